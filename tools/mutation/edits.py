"""What can be changed in a pure module: one small thing at a time, found in its syntax tree.

Left out is what only words a text or says a type: messages of errors, docstrings, texts with a space in them, formatted
texts, annotations, `__all__`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.mutation.operators import named

__all__ = ["Edit", "edits", "files", "text"]

PACKAGE = Path(__file__).parents[2] / "idemgate"
PURE = (
    "core/*", "core/codec/*", "audit/*", "audit/slot/*", "dedup/*", "membership/heartbeats", "membership/ownership",
    "membership/rendezvous",
    "guard/call", "guard/claim_calls", "guard/manage", "guard/record", "store/durability", "store/held",
    "subscribers/expiry/glob", "subscribers/expiry/rules", "topics/recurring",
    "topics/dead_letters", "topics/merge", "topics/messages", "topics/partial", "topics/limits", "topics/policy",
    "topics/registry", "topics/reshard", "worker/clock_offset", "worker/places", "cli/acl_rules",
)  # fmt: skip
"""Modules that decide and do no I/O."""
COMPARED = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
COUNTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
NAMED = frozenset({
    "wrap_decode_errors", "canonical", "check_encodes", "check_name", "digest", "check_iterable", "encode",
    "instant", "milliseconds", "decode_error", "part_of", "text_of", "unpack", "check_int", "_field", "_ms",
    "_one_of", "_parse", "_parsed", "_positive",
})  # fmt: skip
"""What is handed a text only to name the value in an error."""
EXTREMES = {"min": "max", "max": "min"}
Place = ast.expr | ast.stmt


class Edit(NamedTuple):
    """Bytes of a file, and what stands there instead."""

    file: str
    line: int
    begin: int
    end: int
    instead: str
    inside: bool
    """Within the body of a function."""
    name: str = ""
    """What names it in its file when lines come and go (`named`)."""

    @property
    def source(self) -> str:
        """The file, changed."""
        before = text(self.file).encode()
        return (before[: self.begin] + self.instead.encode() + before[self.end :]).decode()

    @property
    def change(self) -> str:
        before = text(self.file).encode()
        first = before.rfind(b"\n", 0, self.begin) + 1
        last = before.find(b"\n", self.end)
        was = before[first:last].decode()
        new = (before[first : self.begin] + self.instead.encode() + before[self.end : last]).decode()
        return f"{' '.join(was.split())} -> {' '.join(new.split())}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.change}"


def files() -> list[str]:
    found = [path for pattern in PURE for path in PACKAGE.glob(f"{pattern}.py")]
    return sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in found if _has_code(path))


def _has_code(path: Path) -> bool:
    return path.stem != "__init__" or path.parent.name == "codec"


@cache
def text(file: str) -> str:
    return (PACKAGE / f"{file}.py").read_text(encoding="utf-8")


def edits(file: str) -> list[Edit]:
    """All of a file, once each."""
    found = {edit: scope for scope, edit in _Reader(file).found()}
    return [
        edit._replace(name=name)
        for name, edit in named((scope or "-", _operator(edit), edit) for edit, scope in found.items())
    ]


def _operator(edit: Edit) -> str:
    """Return the operator, or the value before and after, or what is not done."""
    before = text(edit.file).encode()[edit.begin : edit.end].decode()
    if edit.instead.strip() == "pass":
        return f"no {re.split(r' = |[(:]', before)[0]}"
    signs = re.sub(r"[()\\\s]", "", before)
    for sign, other in (*COMPARED.values(), *COUNTED.values(), ("and", "or"), ("or", "and")):
        if signs == sign.replace(" ", "") and edit.instead == before.replace(sign, other, 1):
            return sign
    instead = edit.instead.strip().removeprefix("(").removesuffix("\n)").strip() if "\n" in before else edit.instead
    if instead in ("True", "False", "None") and before not in ("True", "False"):
        return f"-> {instead}"
    if before.removeprefix("not").strip() == instead.strip():
        return "not"
    short = len(before) <= 12 and "`" not in before and "\n" not in before
    return f"{before if short else '...'} -> {instead}"


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.code = text(file).encode()
        lines = self.code.splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]

    def found(self) -> Iterator[tuple[str, Edit]]:
        """Yield each edit, and the name of the function, class or constant that it changes."""
        yield from self._walk(ast.parse(self.code), False, "")

    def _walk(self, node: ast.AST, inside: bool, scope: str) -> Iterator[tuple[str, Edit]]:
        scope = _scope(node, inside, scope)
        for begin, end, instead in self._changes(node):
            line = next(n for n, start in enumerate(self.starts) if start > begin)
            yield scope, Edit(self.file, line, begin, end, instead, inside)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _worded(node, name, child):
                    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                    yield from self._walk(child, inside or (function and name == "body"), scope)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare():
                terms = [node.left, *node.comparators]
                for (left, right), kind in zip(pairwise(terms), node.ops, strict=True):
                    yield from self._gap(left, right, COMPARED.get(type(kind)))
            case ast.BoolOp():
                pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in pairwise(node.values):
                    yield from self._gap(left, right, pair)
            case ast.BinOp():
                yield from self._gap(node.left, node.right, COUNTED.get(type(node.op)))
            case ast.UnaryOp(op=ast.Not()):
                yield self._whole(node, self._of(node.operand))
            case ast.Constant():
                yield from self._constant(node)
            case ast.Call(func=ast.Name(id=name) as called) if name in EXTREMES:
                yield self._whole(called, EXTREMES[name])
            case _:
                yield from self._flow(node)

    def _flow(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """What is done at all: conditions, returned values, statements."""
        match node:
            case ast.AugAssign():
                yield from self._gap(node.target, node.value, COUNTED.get(type(node.op)))
                yield self._whole(node, "pass")
            case ast.Return(value=ast.expr() as value) if self._of(value) != "None":
                yield self._whole(value, "None")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield from (self._whole(test, instead) for instead in ("True", "False"))
            case ast.comprehension(ifs=tests):
                yield from (self._whole(test, "True") for test in tests)
            case ast.While(test=test):
                yield self._whole(test, "False")
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
                yield self._whole(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._whole(node, "pass")
            case _:
                pass

    def _constant(self, node: ast.Constant) -> Iterator[tuple[int, int, str]]:
        match node.value:
            case bool(value):
                yield self._whole(node, str(not value))
            case int(value) | float(value):
                yield self._whole(node, str(value + 1))
                if value == 1:
                    yield self._whole(node, "0")
            case str(value) | bytes(value):
                yield self._whole(node, repr(value + (b"X" if isinstance(value, bytes) else "X")))
            case _:
                pass

    def _gap(self, left: Place, right: Place, pair: tuple[str, str] | None) -> Iterator[tuple[int, int, str]]:
        """Between two terms the sign is changed; what else is there are brackets and line ends."""
        begin, end = self._span(left)[1], self._span(right)[0]
        if pair:
            between = self.code[begin:end].decode()
            pattern = rf"\b{pair[0]}\b" if pair[0][0].isalpha() else re.escape(pair[0])
            yield begin, end, re.sub(pattern, pair[1], between, count=1)

    def _whole(self, node: Place, instead: str) -> tuple[int, int, str]:
        begin, end = self._span(node)
        kept = self.code[begin:end].count(b"\n") - instead.count("\n")
        outer = isinstance(node, ast.expr) and kept > 0
        return begin, end, f"({instead}{chr(10) * kept})" if outer else instead + "\n" * max(0, kept)

    def _of(self, node: Place) -> str:
        begin, end = self._span(node)
        return self.code[begin:end].decode()

    def _span(self, node: Place) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset


def _scope(node: ast.AST, inside: bool, outer: str) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return f"{outer}.{name}".lstrip(".")
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if not inside:
            return f"{outer}.{name}".lstrip(".")
        case _:
            return outer


def _worded(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """Whether nothing below it is more than wording, or a type."""
    match child:
        case ast.JoinedStr():
            return True
        case ast.Constant(value=str(value)) if " " in value or not value or isinstance(parent, ast.Expr):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) if name in ("__all__", "__slots__"):
            return True
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec" | "NewType"))):
            return True
        case ast.Call(func=ast.Name(id="cast")) | ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.keyword(arg="strict"):
            return True
        case ast.Constant(value=str()) if isinstance(parent, ast.arguments) or _called(parent) in NAMED:
            return True
        case _:
            errors = isinstance(parent, ast.Raise) or _called(parent) in _errors()
            return errors or field in ("annotation", "returns", "decorator_list")


def _called(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


@cache
def _errors() -> frozenset[str]:
    from idemgate import errors

    made = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    return frozenset(made | {"TypeError", "ValueError", "LookupError", "KeyError", "AttributeError"})
