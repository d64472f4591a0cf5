"""`python -m tools.sizes`: the largest files, folders and functions of the package. A report, which fails nothing."""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "idemgate"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield `file:line name` of each function, and its lines without the docstring."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (last := body[-1].end_lineno):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", last - body[0].lineno + 1


def show(title: str, sizes: Counter[str], n: int) -> None:
    print(f"\n{title}: {len(sizes)}, {sum(sizes.values())} in all")
    for name, size in sizes.most_common(n):
        print(f"{size:6} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=10, help="rows of each table")
    n = parser.parse_args().n
    files = [path for suffix in ("py", "lua") for path in sorted(PACKAGE.rglob(f"*.{suffix}"))]
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    for suffix in ("py", "lua"):
        of_kind = Counter({str(path.relative_to(ROOT)): k for path, k in lines.items() if path.suffix == f".{suffix}"})
        show(f"lines of .{suffix} files", of_kind, n)
    show("files of folders", Counter(str(path.parent.relative_to(ROOT)) for path in files), n)
    show(
        "lines of folders", sum((Counter({str(p.parent.relative_to(ROOT)): k}) for p, k in lines.items()), Counter()), n
    )
    python = (path for path in files if path.suffix == ".py")
    show("lines of functions", Counter(dict(row for path in python for row in functions(path))), n)


if __name__ == "__main__":
    main()
