"""Each lint script accepts a clean tree and finds every fault planted in it."""

from __future__ import annotations

from pathlib import Path

import check_docs
import check_layers
import check_mirror
import check_sizes
import check_words
import pytest
from repo import Finding, files


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def messages(found: list[Finding]) -> str:
    return "\n".join(str(finding) for finding in found)


def test_files_leaves_out_build_outputs(tmp_path: Path) -> None:
    plant(tmp_path, "cpp/a.h", "")
    plant(tmp_path, "build/b.h", "")
    plant(tmp_path, "python/__pycache__/c.py", "")
    assert files(tmp_path) == ["cpp/a.h"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "cpp/helicore/kv/pool.h",
            '#include "helicore/core/types.h"\n#include "helicore/kv/page.h"\n',
        ),
        ("cpp/helicore/attention/cuda/mla.cu", "#include <cute/tensor.hpp>\n"),
        ("python/helicore/executor/engine.py", "from helicore.models.base import CausalLM\n"),
        ("python/helicore/models/mla.py", "from . import rope\nfrom helicore import ops\n"),
        ("python/helicore/__init__.py", "from helicore.llm import LLM\n"),
    ],
)
def test_layers_accepts_downward_includes(tmp_path: Path, name: str, text: str) -> None:
    plant(tmp_path, name, text)
    assert check_layers.check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "cpp/helicore/core/types.h",
            '#include "helicore/quant/formats.h"\n',
            "core must not include quant",
        ),
        (
            "cpp/helicore/kv/a.cpp",
            '#include "helicore/attention/mla.h"\n',
            "kv must not include attention",
        ),
        (
            "cpp/helicore/moe/a.cpp",
            '  #  include "helicore/kv/page.h"\n',
            "moe must not include kv",
        ),
        ("cpp/helicore/kv/a.cpp", '#include "helicore/helicore.h"\n', "the umbrella header"),
        ("cpp/helicore/kv/a.cpp", "#include <nanobind/nanobind.h>\n", "must not include nanobind"),
        ("cpp/helicore/nn/a.cpp", "#include <torch/torch.h>\n", "must not include torch"),
        (
            "cpp/helicore/attention/cpu/a.cpp",
            "#include <cute/tensor.hpp>\n",
            "below a cuda/ folder",
        ),
        ("cpp/helicore/surprise/a.h", "", "area 'surprise' has no rank"),
        (
            "python/helicore/models/a.py",
            "from helicore.executor import engine\n",
            "must not import",
        ),
        ("python/helicore/models/a.py", "from ..llm import LLM\n", "must not import helicore.llm"),
        ("python/helicore/kv/a.py", "import helicore.ops\n", "must not import helicore.ops"),
        (
            "python/helicore/models/a.py",
            "def f():\n    from helicore.cli import main\n",
            "must not import helicore.cli",
        ),
        ("python/helicore/surprise.py", "", "module 'surprise' has no rank"),
    ],
)
def test_layers_finds_planted_fault(tmp_path: Path, name: str, text: str, expected: str) -> None:
    plant(tmp_path, name, text)
    assert expected in messages(check_layers.check(tmp_path))


LONG_BODY = "".join(f"  work({i});\n" for i in range(60))
FUNCTION = """\
namespace helicore {
class Pool {
 public:
  explicit Pool(int a) : a_{a}, b_(1) { reset(); }
  [[nodiscard]] int size() const noexcept { return a_; }
  bool operator==(const Pool& other) const { return a_ == other.a_; }
};
struct Params { int a = 0; int b[2] = {1, 2}; };
template <typename T, int N>
auto first(const std::array<T, N>& x, std::map<int, T> y) -> const T& {
  if (x.empty()) { return y.at(0); }
  for (int i = 0; i < 3; ++i) { work([&](int a, int b, int c, int d, int e, int f, int g) {}); }
  return x[0];  // f(a, b, c, d, e, f, g) {
}
}  // namespace helicore
"""


def test_sizes_reads_the_functions_of_ordinary_code() -> None:
    found = {name: parameters for name, _, _, parameters, _ in check_sizes.cpp_functions(FUNCTION)}
    assert found == {"Pool": 1, "size": 0, "operator==": 1, "first": 2}


def test_sizes_accepts_ordinary_code(tmp_path: Path) -> None:
    plant(tmp_path, "cpp/helicore/kv/pool.h", FUNCTION)
    plant(tmp_path, "cpp/helicore/kv/cuda/x.cu", f"__global__ void k(int a) {{\n{LONG_BODY}}}\n")
    plant(tmp_path, "bindings/bind_kv.cpp", f"void bind_kv(nb::module_& m) {{\n{LONG_BODY}}}\n")
    assert check_sizes.check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cpp/helicore/kv/a.cpp", f"void f() {{\n{LONG_BODY}}}\n", "f() has 62 lines"),
        (
            "cpp/helicore/kv/a.cpp",
            f"A::A(int x)\n    : x_(x) {{\n{LONG_BODY}}}\n",
            "A() has 63 lines",
        ),
        (
            "cpp/helicore/kv/a.cpp",
            "int g(int a, int b, int c, int d, int e, int f, F<int, int> g) { return 0; }\n",
            "g() has 7 parameters",
        ),
        (
            "cpp/helicore/kv/a.h",
            "class A {\n  int g(int a, int b, int c, int d, int e, int f, int g) const { }\n};\n",
            "g() has 7 parameters",
        ),
        ("cpp/helicore/kv/a.h", "//\n" * 301, "301 lines, allowed 300"),
        ("cpp/helicore/kv/a.cpp", "//\n" * 601, "601 lines, allowed 600"),
        ("cpp/helicore/kv/cpu/a.inc.cpp", "//\n" * 901, "901 lines, allowed 900"),
        ("bindings/bind_kv.cpp", "//\n" * 401, "401 lines, allowed 400"),
        ("python/helicore/a.py", "#\n" * 501, "501 lines, allowed 500"),
        (
            "python/helicore/a.py",
            "def f():\n    'Says what.'\n" + "    pass\n" * 61,
            "f() has 61 lines, allowed 60",
        ),
    ],
)
def test_sizes_finds_planted_fault(tmp_path: Path, name: str, text: str, expected: str) -> None:
    plant(tmp_path, name, text)
    assert expected in messages(check_sizes.check(tmp_path))


def good_area(root: Path) -> None:
    plant(root, "cpp/helicore/kv/CMakeLists.txt", "SOURCES page.cpp cpu/copy.inc.cpp\n")
    plant(root, "cpp/helicore/kv/README.md", "# kv\n")
    plant(root, "cpp/helicore/kv/page.h", "")
    plant(root, "cpp/helicore/kv/page.cpp", "")
    plant(root, "cpp/helicore/kv/cpu/copy.inc.cpp", "")
    plant(root, "tests/cpp/kv/CMakeLists.txt", "page_test.cpp manager_property_test.cpp\n")
    plant(root, "tests/cpp/kv/page_test.cpp", "")
    plant(root, "tests/cpp/kv/manager_property_test.cpp", "")


def test_mirror_accepts_an_ordinary_area(tmp_path: Path) -> None:
    good_area(tmp_path)
    assert check_mirror.check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpp/helicore/kv/extra.cpp", "not listed in cpp/helicore/kv/CMakeLists.txt"),
        ("tests/cpp/kv/page_more_test.cpp", "not listed in tests/cpp/kv/CMakeLists.txt"),
        ("tests/cpp/kv/stray_test.cpp", "no unit of cpp/helicore/kv is called 'stray'"),
        ("tests/cpp/gone/page_test.cpp", "there is no area cpp/helicore/gone"),
        ("cpp/helicore/nn/norm.h", "the area has no README.md"),
        ("cpp/helicore/moe/router.h", "the area has no test in tests/cpp/moe"),
    ],
)
def test_mirror_finds_planted_fault(tmp_path: Path, name: str, expected: str) -> None:
    good_area(tmp_path)
    plant(tmp_path, name, "")
    assert expected in messages(check_mirror.check(tmp_path))


def test_words_accepts_ordinary_text(tmp_path: Path) -> None:
    plant(tmp_path, "a.cpp", "switch (x) {\n  case 3:\n  case 2 * 256 + 32:\n    break;\n}\n")
    plant(
        tmp_path, "b.md", "In that case two pages are copied from the host. See docs/work.md, #1.\n"
    )
    plant(tmp_path, "c.py", "path = '/usr/bin/python3'  # colour #123456\nurl = 'a/work/b'\n")
    assert check_words.check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.py", "x = '/wor" + "k/main'"),
        ("a.md", "built in /roo" + "t/.pyenv"),
        ("Makefile", "X := /tm" + "p/h" + "c/base"),
        ("a.cpp", "// for iss" + "ue 2"),
        ("a.md", "see #" + "1234"),
        ("a.md", "as in share" + "d/design/x.md"),
        ("a.h", "// spec/" + "kv-cache.md says so"),
        ("a.md", "this answers cas" + "e 55"),
        ("a.cpp", "f();  // cas" + "e 7"),
        ("a.h", "// mir" + "rors the vLLM class"),
        ("a.h", "// the name was chan" + "ged to page"),
        ("a.py", "# FIX" + "ME"),
        ("a.py", "# TO" + "DO later"),
    ],
)
def test_words_finds_planted_fault(tmp_path: Path, name: str, line: str) -> None:
    plant(tmp_path, name, f"{line}\n")
    assert len(check_words.check(tmp_path)) >= 1


def good_documents(root: Path) -> None:
    for name in check_docs.REQUIRED:
        plant(root, name, "# Title\n")
    entries = "".join(f"**{term}**: a thing.\n\n" for term in check_docs.TERMS)
    plant(root, "docs/glossary.md", f"# Glossary\n\n{entries}")
    plant(
        root,
        "README.md",
        "# helicore\n\n[terms](docs/glossary.md#glossary), [web](https://x.org)\n",
    )
    plant(root, "pyproject.toml", '[project]\nversion = "0.1.0"\n')
    plant(root, "CMakeLists.txt", "project(helicore VERSION 0.1.0 LANGUAGES CXX)\n")
    plant(root, "python/helicore/_version.py", '__version__ = "0.1.0"\n')
    plant(root, "CHANGELOG.md", "## [Unreleased]\n\n## [0.1.0]\n")


def test_docs_accepts_a_complete_set(tmp_path: Path) -> None:
    good_documents(tmp_path)
    assert check_docs.check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("docs/index.md", "[a](nowhere.md)\n", "link to nowhere.md, which does not exist"),
        ("docs/index.md", "[a](glossary.md#gone)\n", "no such heading in glossary.md"),
        ("docs/glossary.md", "**page**: one.\n\n**page**: two.\n", "'page' is defined 2 times"),
        ("docs/glossary.md", "# Glossary\n", "'block' is defined 0 times"),
        ("python/helicore/_version.py", '__version__ = "0.2.0"\n', "version 0.2.0"),
        ("CMakeLists.txt", "project(helicore)\n", "no version found"),
    ],
)
def test_docs_finds_planted_fault(tmp_path: Path, name: str, text: str, expected: str) -> None:
    good_documents(tmp_path)
    plant(tmp_path, name, text)
    assert expected in messages(check_docs.check(tmp_path))


def test_docs_finds_a_missing_document(tmp_path: Path) -> None:
    good_documents(tmp_path)
    (tmp_path / "CONTRIBUTING.md").unlink()
    assert "CONTRIBUTING.md: missing" in messages(check_docs.check(tmp_path))
