"""The stub generator: committed stubs are current, and each thing that nanobind records is kept."""

from __future__ import annotations

import enum
import subprocess
import sys
import types
from pathlib import Path

import pytest
import stubs


def nanobind_type(name: str) -> type:
    return type(name, (), {"__module__": "nanobind"})


NbFunc, NbMethod = nanobind_type("nb_func"), nanobind_type("nb_method")


def function(kind: type, name: str, *signatures: tuple[object, ...]) -> object:
    made = kind()
    made.__name__ = name
    made.__nb_signature__ = signatures
    return made


class Tier(enum.IntEnum):
    GPU = 0
    HOST = 1


def sample_module() -> types.ModuleType:
    """A module with what nanobind makes of a small binding."""
    module = types.ModuleType("sample")
    module.__doc__ = "A sample."
    add = (
        ("def add(a: int, b: int = \\0) -> int", "Sum.", (1,)),
        ("def add(a: str, b: str, /) -> str", None, None),
    )
    module.add = function(NbFunc, "add", *add)
    module.only = function(NbFunc, "only", ("def only(arg: int, /) -> None", None, None))
    module.rows = function(
        NbFunc,
        "rows",
        (
            "def rows(x: torch.Tensor, *, table: numpy.ndarray[dtype=int32, shape=(*)]) -> None",
            "",
            (),
        ),
    )
    resize = (
        "def resize(self, capacity: int, *, tier: sample.Tier | None = None) -> bool",
        "R.",
        (),
    )
    capacity = property(
        function(NbMethod, "capacity", ("def capacity(self) -> int", "Tokens.", ()))
    )
    Tier.__module__ = "sample"
    module.Tier = Tier
    Cache = type(
        "Cache",
        (),
        {
            "__module__": "sample",
            "resize": function(NbMethod, "resize", resize),
            "capacity": capacity,
            "make": staticmethod(
                function(NbFunc, "make", ("def make() -> sample.Cache", None, ()))
            ),
        },
    )
    module.Cache = Cache
    return module


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    module = sample_module()
    sys.modules["sample"] = module
    try:
        folder = tmp_path_factory.mktemp("stubs")
        printer = stubs.StubPrinter(invalid_expr_as_ellipses=True, print_value_comments=False)
        stubs.run(
            stubs.Parser(),
            printer,
            ["sample"],
            str(folder),
            None,
            False,
            stubs.Writer(stub_ext="pyi"),
        )
    finally:
        del sys.modules["sample"]
    text = (folder / "sample.pyi").read_text()
    compile(text, "sample.pyi", "exec")
    return text


@pytest.mark.parametrize(
    "line",
    [
        "def add(a: int, b: int = 1) -> int:",
        "def add(a: str, b: str, /) -> str:",
        "def only(arg: int, /) -> None:",
        "def resize(self, capacity: int, *, tier: Tier | None = None) -> bool:",
        "def capacity(self) -> int:",
        "def make() -> Cache:",
        "    GPU = 0",
        "    HOST = 1",
        "class Tier(enum.IntEnum):",
        "import numpy.typing",
        "import torch",
    ],
)
def test_the_stub_has_the_line(stub: str, line: str) -> None:
    assert line in stub


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.999999974752427e-07, "1e-06"), (0.1, "0.1"), (0.5, "0.5"), (1 / 3, repr(1 / 3))],
)
def test_float_defaults_are_short(value: float, text: str) -> None:
    assert stubs.short_float(value) == text


def test_both_overloads_are_marked(stub: str) -> None:
    assert stub.count("@typing.overload") == 2


def test_arrays_are_typed_by_element(stub: str) -> None:
    assert "table: numpy.typing.NDArray[numpy.int32]" in stub


def test_enum_machinery_stays_out(stub: str) -> None:
    for name in ("_member_map_", "__new__", "_generate_next_value_", "ClassVar[Tier]"):
        assert name not in stub


def test_the_static_method_is_marked(stub: str) -> None:
    assert "@staticmethod\n    def make()" in stub


def test_cross_check_agrees_with_itself(stub: str) -> None:
    assert stubs.cross_check(stub, stub, "sample") == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def only(arg: int, /)", "def only(other: int, /)", "only has parameters"),
        ("def only(", "def dropped(", "only is missing in our stub"),
        ("    HOST = 1\n", "", "Tier.HOST is missing in our stub"),
    ],
)
def test_cross_check_finds_planted_fault(stub: str, old: str, new: str, expected: str) -> None:
    assert old in stub
    assert expected in "\n".join(stubs.cross_check(stub.replace(old, new), stub, "sample"))


def test_compare_shows_what_changed_and_what_is_stale(tmp_path: Path) -> None:
    (tmp_path / "kv.pyi").write_text("def a() -> int: ...\n")
    (tmp_path / "gone.pyi").write_text("x: int\n")
    text = "\n".join(stubs.compare({"kv.pyi": "def a() -> str: ...\n"}, tmp_path))
    assert "-def a() -> int: ..." in text
    assert "+def a() -> str: ..." in text
    assert "-x: int" in text
    assert (
        stubs.compare({"kv.pyi": "def a() -> int: ...\n", "gone.pyi": "x: int\n"}, tmp_path) == []
    )


def test_names_that_a_generator_would_drop_are_refused() -> None:
    assert stubs.trailing_underscores({"a.pyi": "def scale_(x: int) -> None: ...\n"}) != []
    assert stubs.trailing_underscores({"a.pyi": "def __init__(self) -> None: ...\n"}) == []


def test_committed_stubs_are_those_of_the_bindings(root: Path) -> None:
    command = [sys.executable, str(root / "tools" / "stubs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
