"""Imports go down only; rooms of one level do not know each other. The picture is in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "idemgate"
LEVELS = [
    {"errors"},
    {"lua"},
    {"core"},
    {"link"},
    {"once", "topic", "testing"},
    {"work"},
    {"gate"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ONLY_IN = {"redis": "link", "hiredis": "link", "msgpack": "core"}
KEY_PREFIX = "ig1:"
KEY_MODULE = "core/keys.py"


def violations(path: str, source: str) -> list[str]:
    """What the module at `path` (relative to the package, as posix) does that its room may not."""
    room = path.removesuffix(".py").split("/")[0]
    if room not in LEVEL:
        return [f"{path}: unknown room {room!r}; give it a level"]
    tree = ast.parse(source)
    lines = [
        f"{path}:{line}: {room} imports {target}"
        for target, when, line in imports(tree)
        if not allowed(room, target, when)
    ]
    if path != KEY_MODULE:
        lines += [f"{path}:{line}: joins key parts" for line in key_literals(tree)]
    return lines


def imports(tree: ast.AST, when: str = "eager") -> Iterator[tuple[str, str, int]]:
    """Every imported room or foreign package, when it is imported (eager, lazy, typing), and the line."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((target(alias.name), when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"idemgate.{alias.name}" for alias in node.names] if module == "idemgate" else [module]
            yield from ((target(name), when, node.lineno) for name in names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, "lazy")
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports(ast.Module(node.body, []), "typing")
            yield from imports(ast.Module(node.orelse, []), when)
        else:
            yield from imports(node, when)


def target(module: str) -> str:
    """`idemgate.core.keys` -> `core`; `idemgate.Gate` -> `__init__`; `redis.asyncio` -> `redis`."""
    first, _, rest = module.partition(".")
    if first != "idemgate":
        return module if first == "" else first
    room = rest.split(".")[0]
    return room if room in LEVEL else "__init__"


def allowed(room: str, target: str, when: str) -> bool:
    if target.startswith("."):
        return False  # a relative import hides its room
    if target not in LEVEL:
        return ONLY_IN.get(target, room) == room
    if target == room or LEVEL[target] < LEVEL[room]:
        return True
    if target == "gate" and when == "typing":
        return True  # what a gate carries may say whose it is
    beside = LEVEL[target] == LEVEL[room]
    return beside and (when == "typing" or (when == "lazy" and room == "cli"))


def key_literals(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY_PREFIX in node.value
    ]


def test_the_package_keeps_its_rooms() -> None:
    # Given every module there is
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    # Then there are some, and none breaks a rule
    assert "errors.py" in sources
    assert [line for path in sorted(sources) for line in violations(path, sources[path])] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param("core/keys.py", "from idemgate.link.sync import Link", id="core knows the link"),
        pytest.param("core/keys.py", "from idemgate import Gate", id="core knows the front door"),
        pytest.param("core/keys.py", "import idemgate", id="core imports the front door"),
        pytest.param("link/url.py", "def f():\n    from idemgate.gate import Gate", id="lazily upward"),
        pytest.param("errors.py", "import idemgate.core.keys", id="errors know core"),
        pytest.param("lua/__init__.py", "from idemgate import core", id="room named by the name, not the module"),
        pytest.param("topic.py", "from idemgate.once import guard", id="beside"),
        pytest.param("topic.py", "def f():\n    from idemgate.once import guard", id="beside, lazily, not the gate"),
        pytest.param("work/worker.py", "from idemgate.gate import Gate", id="work knows the gate, not only its type"),
        pytest.param(
            "once/claim.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import idemgate.gate", id="else of typing"
        ),
        pytest.param("work/worker.py", "try:\n    import redis.asyncio as r\nexcept ImportError: ...", id="redis"),
        pytest.param("gate.py", "import hiredis", id="hiredis outside the link"),
        pytest.param("link/sync.py", "import msgpack", id="msgpack outside core"),
        pytest.param("core/calls.py", "from .keys import record", id="relative"),
        pytest.param("core/calls.py", "def f(x):\n    return f'ig1:{x}'", id="a key joined elsewhere"),
        pytest.param("helpers.py", "", id="unknown room"),
    ],
)
def test_a_breach_is_named_with_its_place(path: str, source: str) -> None:
    found = violations(path, source)
    assert len(found) == 1, found
    assert found[0].startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param(
            "__init__.py", "from idemgate.gate import Gate\nfrom idemgate.topic import Topic", id="front door"
        ),
        pytest.param("cli/__init__.py", "from idemgate.work import worker\nimport argparse", id="down two"),
        pytest.param("core/keys.py", "PREFIX = 'ig1:'\nfrom idemgate.errors import BadInput", id="the key module"),
        pytest.param("core/codec.py", "import msgpack", id="msgpack in core"),
        pytest.param("once/claim.py", "if TYPE_CHECKING:\n    from idemgate.gate import Gate", id="the gate's type"),
        pytest.param("link/aio.py", "import redis.asyncio", id="redis in the link"),
        pytest.param("once.py", "if TYPE_CHECKING:\n    from idemgate.gate import Gate", id="beside, only a type"),
    ],
)
def test_what_goes_down_is_free(path: str, source: str) -> None:
    assert violations(path, source) == []
