"""Writes the type stubs of helicore._core, or with --check compares them with the committed ones.

pybind11-stubgen generates them: its traversal, import repair and printer are used, while the
adapter below reads what nanobind records about each function (`__nb_signature__`): overloads,
defaults, positional-only and keyword-only arguments, enum members. --check also generates stubs
with nanobind's own generator and compares names and parameters, so that neither tool can drop
something unseen.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import enum
import importlib
import math
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pybind11_stubgen import run
from pybind11_stubgen.parser.mixins import error_handlers, filter, fix, parse
from pybind11_stubgen.printer import Printer
from pybind11_stubgen.structs import (
    Annotation,
    Argument,
    Attribute,
    Class,
    Decorator,
    Docstring,
    Field,
    Function,
    Identifier,
    Method,
    Property,
    QualifiedName,
    Value,
)
from pybind11_stubgen.writer import Writer

MODULE = "helicore._core"
ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "python" / "helicore" / "_core"
_ARRAY = re.compile(r"(?P<framework>numpy\.ndarray|torch\.Tensor|ndarray)\[(?P<spec>[^\[\]]*)\]")
_DEFAULT = re.compile(r"__default_(\d+)__")
# What nanobind and Python add to every class and enum and no reader needs.
_HIDDEN = frozenset({"__new__", "__nb_enum__", "__nb_signature__", "__firstlineno__"})


def is_nanobind_function(value: object) -> bool:
    """Whether it is a function or method object of nanobind's own types."""
    kind = type(value)
    names = ("nb_func", "nb_method", "nb_bound_method")
    return kind.__module__ == "nanobind" and kind.__name__ in names


def array_type(match: re.Match[str]) -> str:
    """`numpy.ndarray[dtype=int32, shape=(*)]` as a type that checkers know."""
    if match["framework"] != "numpy.ndarray":
        return "torch.Tensor"
    dtype = re.search(r"dtype=(\w+)", match["spec"])
    return (
        f"numpy.typing.NDArray[numpy.{dtype[1]}]" if dtype else "numpy.typing.NDArray[typing.Any]"
    )


def short_float(value: float) -> str:
    """The shortest text of a C++ float: 1e-06, not 9.999999974752427e-07."""
    single = struct.unpack("f", struct.pack("f", value))[0] if math.isfinite(value) else None
    if single == value:
        for digits in range(1, 9):
            text = f"{value:.{digits}g}"
            if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
                return repr(float(text))
    return repr(value)


def parse_signature(signature: str, name: str) -> ast.FunctionDef:
    """One nanobind signature as a syntax tree; default values are named `__default_<i>__`."""
    text = _ARRAY.sub(array_type, signature)
    text = re.sub(r"\\(\d+)", r"__default_\1__", text)
    text = re.sub(r"^(?:def\s+)?\w*\(", f"def {name}(", text, count=1)
    node = ast.parse(f"{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef), signature
    return node


class StubPrinter(Printer):
    """Prints one-line docstrings on one line, enum members in their order, and a closing `/`."""

    def print_class_body(self, class_: Class) -> list[str]:
        if not any(base[0] == "enum" for base in class_.bases):
            body: list[str] = super().print_class_body(class_)
            return body
        lines = self.print_docstring(class_.doc) if class_.doc else []
        for field in class_.fields:
            lines += self.print_field(field)
        return lines

    def print_docstring(self, doc: Docstring) -> list[str]:
        lines: list[str] = super().print_docstring(doc)
        if len(lines) == 3 and not lines[1].endswith(('"', "\\")):
            return [f'"""{lines[1].strip()}"""']
        return lines

    def print_function(self, func: Function) -> list[str]:
        lines: list[str] = super().print_function(func)
        named = [a for a in func.args if a.name != "self"]
        if named and all(a.pos_only for a in named):
            at = next(i for i, line in enumerate(lines) if line.startswith("def "))
            lines[at] = _insert_slash(lines[at])
        return lines


def _insert_slash(line: str) -> str:
    """Puts `, /` before the parenthesis that closes the parameters of a `def` line."""
    depth = 0
    for position, character in enumerate(line):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return f"{line[:position]}, /{line[position:]}"
    return line


class NanobindAdapter:
    """Mixin for a pybind11-stubgen parser that understands nanobind's objects."""

    def handle_module_member(self, path: QualifiedName, module: Any, member: Any) -> Any:
        if is_nanobind_function(member):
            return self.handle_function(path, member)
        return super().handle_module_member(path, module, member)  # type: ignore[misc]

    def handle_class_member(self, path: QualifiedName, class_: type, member: Any) -> Any:
        name = path[-1]
        if name in _HIDDEN:
            return None
        if name == "__doc__":
            return super().handle_class_member(path, class_, member)  # type: ignore[misc]
        if name not in class_.__dict__ or issubclass(class_, enum.Enum):
            return None  # inherited, or an enum's machinery; handle_class adds the members
        if is_nanobind_function(member):
            plain = type(class_.__dict__[name]).__name__ != "nb_method"
            modifier = "static" if plain else None
            functions = self.handle_function(path, member)
            return [Method(function=f, modifier=modifier) for f in functions]  # type: ignore[arg-type]
        return super().handle_class_member(path, class_, member)  # type: ignore[misc]

    def handle_class(self, path: QualifiedName, class_: type) -> Class | None:
        result: Class | None = super().handle_class(path, class_)  # type: ignore[misc]
        if result is not None and issubclass(class_, enum.Enum):
            result.fields = [
                Field(
                    Attribute(Identifier(name), Value(repr(member.value), is_print_safe=True)),
                    modifier="static",
                )
                for name, member in class_.__members__.items()
            ]
            result.methods, result.properties, result.aliases = [], [], []
        return result

    def handle_property(self, path: QualifiedName, prop: Any) -> Property | None:
        getter = getattr(prop, "fget", None)
        if not is_nanobind_function(getter):
            found: Property | None = super().handle_property(path, prop)  # type: ignore[misc]
            return found
        result = Property(name=path[-1], modifier=None)
        result.getter = self.handle_function(path, getter)[0]
        if prop.fset is not None:
            result.setter = self.handle_function(path, prop.fset)[0]
            result.setter.doc = None
        return result

    def handle_function(self, path: QualifiedName, func: Any) -> list[Function]:
        signatures = getattr(func, "__nb_signature__", None)
        if not signatures:
            found: list[Function] = super().handle_function(path, func)  # type: ignore[misc]
            return found
        functions = []
        for signature, doc, *rest in signatures:
            node = parse_signature(signature, path[-1])
            function = Function(
                name=Identifier(path[-1]),
                args=self._arguments(node.args, rest[0] if rest else ()),
                returns=self._annotation(node.returns),
                doc=Docstring(doc) if doc else None,
            )
            if len(signatures) > 1:
                self._annotation(ast.parse("typing.overload", mode="eval").body)  # its import
                function.decorators.append(Decorator("typing.overload"))
            functions.append(function)
        return functions

    def _arguments(self, args: ast.arguments, defaults: Any) -> list[Argument]:
        positional = args.posonlyargs + args.args
        values: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
        result = [
            Argument(
                Identifier(arg.arg),
                pos_only=arg in args.posonlyargs,
                default=self._default(value, defaults),
                annotation=self._annotation(arg.annotation),
            )
            for arg, value in zip(positional, values + list(args.defaults), strict=True)
        ]
        if args.vararg:
            annotation = self._annotation(args.vararg.annotation)
            result.append(
                Argument(Identifier(args.vararg.arg), variadic=True, annotation=annotation)
            )
        result += [
            Argument(
                Identifier(arg.arg),
                kw_only=True,
                default=self._default(value, defaults),
                annotation=self._annotation(arg.annotation),
            )
            for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ]
        if args.kwarg:
            annotation = self._annotation(args.kwarg.annotation)
            result.append(
                Argument(Identifier(args.kwarg.arg), kw_variadic=True, annotation=annotation)
            )
        return result

    def _default(self, node: ast.expr | None, defaults: Any) -> Value | None:
        if node is None:
            return None
        text = ast.unparse(node)
        match = _DEFAULT.fullmatch(text)
        if match is None:
            return Value(text, is_print_safe=True)
        default = defaults[int(match[1])]
        if isinstance(default, float):
            return Value(short_float(default), is_print_safe=math.isfinite(default))
        if isinstance(default, str):  # nanobind hands over source text or a value
            return Value(repr(default), is_print_safe=True)
        value: Value = self.handle_value(default)  # type: ignore[attr-defined]
        return value

    def _annotation(self, node: ast.expr | None) -> Annotation | None:
        if node is None:
            return None
        parsed: Annotation = self.parse_annotation_str(ast.unparse(node))  # type: ignore[attr-defined]
        return parsed


class Parser(
    error_handlers.LoggerData,
    fix.FixMissing__future__AnnotationsImport,
    fix.FixMissing__all__Attribute,
    fix.FixMissingNoneHashFieldAnnotation,
    fix.FixMissingImports,
    filter.FilterTypingModuleAttributes,
    fix.FixPEP585CollectionNames,
    fix.FixTypingTypeNames,
    fix.OverridePrintSafeValues,
    fix.FixCurrentModulePrefixInTypeNames,
    fix.FixBuiltinTypes,
    NanobindAdapter,
    filter.FilterClassMembers,
    filter.FilterInvalidIdentifiers,
    fix.FixValueReprRandomAddress,
    fix.FixRedundantBuiltinsAnnotation,
    fix.FixRedundantMethodsFromBuiltinObject,
    fix.RemoveSelfAnnotation,
    parse.ExtractSignaturesFromPybind11Docstrings,
    parse.ParserDispatchMixin,
    parse.BaseParser,
    error_handlers.LogErrors,
    error_handlers.SuggestCxxSignatureFix,
    error_handlers.TerminateOnFatalErrors,
):
    """pybind11-stubgen's parser with the adapter in place of what reads pybind11 docstrings."""


def generate(module: str, folder: Path) -> dict[str, str]:
    """Stubs of a module and its submodules: file name below the module's folder -> text."""
    printer = StubPrinter(invalid_expr_as_ellipses=True, print_value_comments=False)
    run(
        Parser(),  # type: ignore[no-untyped-call]
        printer,
        [module],
        str(folder),
        root_suffix=None,
        dry_run=False,
        writer=Writer(stub_ext="pyi"),
    )
    top = folder.joinpath(*module.split("."))
    found = sorted(top.rglob("*.pyi"))
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--line-length", "100", top],
        check=True,
    )
    return {path.relative_to(top).as_posix(): path.read_text(encoding="utf-8") for path in found}


def outline(text: str) -> dict[str, set[tuple[str, ...]]]:
    """Dotted public name -> parameter lists: what two generators of one module must agree on."""
    found: dict[str, set[tuple[str, ...]]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                args = node.args
                names = tuple(a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs])
                found.setdefault(prefix + node.name, set()).add(names)
            elif isinstance(node, ast.ClassDef):
                found.setdefault(prefix + node.name, set())
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.setdefault(prefix + node.target.id, set())
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(prefix + target.id, set())

    walk(ast.parse(text).body, "")
    return {name: lists for name, lists in found.items() if not _unstable(name)}


def _unstable(name: str) -> bool:
    """Names that the generators treat differently by design: dunder members and private names."""
    last = name.rsplit(".", 1)[-1]
    return last.startswith("_") or last.endswith("_")


def cross_check(ours: str, theirs: str, name: str) -> list[str]:
    """What two stubs of one module do not agree on."""
    left, right = outline(ours), outline(theirs)
    found = [f"{name}: {n} is only in our stub" for n in sorted(left.keys() - right.keys())]
    found += [f"{name}: {n} is missing in our stub" for n in sorted(right.keys() - left.keys())]
    for both in sorted(left.keys() & right.keys()):
        if left[both] and right[both] and left[both] != right[both]:
            found.append(f"{name}: {both} has parameters {left[both]}, not {right[both]}")
    return found


def trailing_underscores(stubs: dict[str, str]) -> list[str]:
    """Names that nanobind's generator would drop without a word; bindings must not have them."""
    return [
        f"{file}: {node.name} ends with an underscore; nanobind's generator drops such names"
        for file, text in stubs.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and re.search(r"[^_]_$", node.name)
    ]


def nanobind_stubs(folder: Path) -> dict[str, str]:
    """The same by nanobind's own generator."""
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", MODULE, "-r", "-O", str(folder)],
        check=True,
    )
    top = next(
        path for path in (folder / "helicore" / "_core", folder / "_core", folder) if path.is_dir()
    )
    return {
        p.relative_to(top).as_posix(): p.read_text(encoding="utf-8") for p in top.rglob("*.pyi")
    }


def compare(fresh: dict[str, str], committed: Path) -> list[str]:
    """Unified diffs between fresh stubs and the committed files, in both directions."""
    lines: list[str] = []
    present = {p.relative_to(committed).as_posix(): p.read_text() for p in committed.rglob("*.pyi")}
    for name in sorted(fresh.keys() | present.keys()):
        lines += difflib.unified_diff(
            present.get(name, "").splitlines(),
            fresh.get(name, "").splitlines(),
            f"committed/{name}",
            f"bindings/{name}",
            lineterm="",
        )
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    importlib.import_module(MODULE)
    with tempfile.TemporaryDirectory() as temporary:
        fresh = generate(MODULE, Path(temporary) / "ours")
        if not args.check:
            COMMITTED.mkdir(exist_ok=True)
            for stale in COMMITTED.rglob("*.pyi"):
                stale.unlink()
            for name, text in fresh.items():
                (COMMITTED / name).write_text(text, encoding="utf-8")
            print(f"{len(fresh)} stubs written to {COMMITTED.relative_to(ROOT)}")
            return 0
        faults = compare(fresh, COMMITTED) + trailing_underscores(fresh)
        theirs = nanobind_stubs(Path(temporary) / "theirs")
        for name in sorted(fresh.keys() | theirs.keys()):
            faults += cross_check(fresh.get(name, ""), theirs.get(name, ""), name)
    print("\n".join(faults) if faults else f"{len(fresh)} stubs are up to date")
    if faults:
        print("The stubs differ from the bindings: run `make stubs` and commit the result.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
