"""Nothing in the packages turns data into code, or imports what data names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "idemgate", *sorted((ROOT / "integrations").glob("*/idemgate_*"))]
FILES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]
MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve"})
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset({("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen")})
NAMED = {
    "idemgate/cli/__init__.py": "import_module",
    "idemgate/cli/run.py": "importlib.import_module",
    "idemgate/errors.py": "pickle",
}
"""The module of a command is imported when it is called, and what the user of the command line names. An error that is
pickled copies its values, to see if it can."""


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if {alias.name for alias in node.names} != {"PicklingError"}:  # it is raised, and decodes nothing
                yield from (name for name in names if name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS or tuple(name.split(".")) in METHODS or name.endswith("import_module"):
        yield name
    yield from ("shell=True" for word in node.keywords if word.arg == "shell" and ast.unparse(word.value) != "False")


def test_no_data_becomes_code() -> None:
    assert len(FILES) > 100
    for file in FILES:
        allowed = NAMED.get(file.relative_to(ROOT).as_posix())
        assert [one for one in dangers(file.read_text()) if one != allowed] == [], file


@for_each(
    "source",
    [
        "import pickle", "from pickle import loads", "import marshal as m", "eval('1')", "exec(x)", "yaml.load(x)",
        "importlib.import_module(x)", "run('x', shell=True)", "import shelve", "os.system('x')", "__import__('x')",
    ],
)  # fmt: skip
def test_each_danger_would_be_seen(source: str) -> None:
    assert list(dangers(source))


def test_scripts_are_constants() -> None:
    # No Lua is joined from what users say: the only text that is sent as a script is that of a file.
    for file in FILES:
        if file.parent.name != "lua":
            assert "redis.call" not in file.read_text(), file
