"""The layout of the package: which package may import which, and no circles.

CONTRIBUTING.md has the picture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.for_each import for_each

PACKAGE = Path(__file__).parents[2] / "idemgate"
LEVELS = [
    {"errors"},
    {"lua"},
    {"core"},
    {"store"},
    {"guard", "dedup", "membership"},
    {"topics"},
    {"subscribers"},
    {"worker"},
    {"presence"},
    {"audit", "history"},
    {"gate_aio"},
    {"gate"},
    {"default_gate"},
    {"testing"},
    {"operate"},
    {"metrics"},
    {"ui"},
    {"cli"},
    {"__init__", "__main__", "types"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
ONLY_IN = {
    "redis": {"store"},
    "hiredis": {"store"},
    "msgpack": {"core", "audit", "topics"},
    "prometheus_client": {"metrics"},
}
KEY_PREFIX = "ig2:"
KEY_MODULE = "core/keys.py"


def violations(path: str, source: str) -> list[str]:
    """Return what the module at `path` (relative to the package, as posix) imports or does that its package may not."""
    package = path.removesuffix(".py").split("/")[0]
    if package not in LEVEL:
        return [f"{path}: unknown package {package!r}; give it a level"]
    tree = ast.parse(source)
    lines = [
        f"{path}:{line}: {package} imports {target}"
        for target, line in imports(tree)
        if not is_allowed(package, target)
    ]
    if path != KEY_MODULE:
        lines += [f"{path}:{line}: joins key parts" for line in key_literals(tree)]
    return lines


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported package of ours or of others, and the line; imports for types and lazy ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((package_of(alias.name), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"idemgate.{alias.name}" for alias in node.names] if module == "idemgate" else [module]
            yield from ((package_of(name), node.lineno) for name in names)


def package_of(module: str) -> str:
    """`idemgate.core.keys` -> `core`; `idemgate.Gate` -> `__init__`; `redis.asyncio` -> `redis`."""
    first, _, rest = module.partition(".")
    if first == "":
        return module
    if first != "idemgate":
        return f"{first} (standard library)" if first in LEVEL else first  # `types` is also a module of Python
    package = rest.split(".")[0]
    return package if package in LEVEL else "__init__"


def is_allowed(package: str, target: str) -> bool:
    if target.startswith("."):
        return False  # a relative import hides its package
    if target not in LEVEL:
        return package in ONLY_IN.get(target, {package})
    return target == package or LEVEL[target] < LEVEL[package]


def key_literals(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY_PREFIX in node.value
    ]


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which module imports which. An import of a name of a package counts as one of the package."""
    modules = {name_of(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(sources[path])):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.add(full if full in modules else node.module)
        graph[name] = (found & {*modules}) - {name, "idemgate"}
    return graph


def name_of(path: str) -> str:
    return "idemgate." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, by Tarjan's algorithm (SIAM J. Comput. 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(one: str) -> None:
        order[one] = low[one] = len(order)
        stack.append(one)
        for other in graph[one]:
            if other not in order:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], order[other])
        if low[one] == order[one]:
            at = stack.index(one)
            if len(stack) > at + 1:
                found.append({*stack[at:]})
            del stack[at:]

    for one in graph:
        if one not in order:
            visit(one)
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    found = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert "errors.py" in found
    return found


def test_imports_go_down_only(sources: dict[str, str]) -> None:
    assert [line for path in sorted(sources) for line in violations(path, sources[path])] == []


def test_no_modules_import_each_other(sources: dict[str, str]) -> None:
    assert circles(module_graph(sources)) == []


def test_timeouts_use_the_clock_that_test_tools_do_not_freeze(sources: dict[str, str]) -> None:
    # The commands and the supervisor's process are run by no test that freezes the time.
    exempt = ("cli/", "core/clock.py", "store/embedded/supervisor.py")
    frozen = re.compile(r"from time import .*\b(?:monotonic|perf_counter)\b|\btime\.(?:monotonic|perf_counter)\b")
    assert [path for path, source in sources.items() if not path.startswith(exempt) and frozen.search(source)] == []


@for_each(
    ("path", "source"),
    [
        pytest.param("core/keys.py", "from idemgate.store.sync import SyncLink", id="core imports the store"),
        pytest.param("core/keys.py", "from idemgate import Gate", id="core imports the front door"),
        pytest.param("core/keys.py", "import idemgate", id="core imports the whole package"),
        pytest.param("store/url.py", "def f():\n    from idemgate.gate import Gate", id="lazily upward"),
        pytest.param("errors.py", "import idemgate.core.keys", id="errors import core"),
        pytest.param("lua/__init__.py", "from idemgate import core", id="a package by its name"),
        pytest.param("dedup/dedup.py", "from idemgate.guard import claim", id="beside"),
        pytest.param("dedup/dedup.py", "def f():\n    from idemgate.guard import claim", id="beside, lazily"),
        pytest.param("guard/claim.py", "if TYPE_CHECKING:\n    from idemgate.gate import Gate", id="upward for a type"),
        pytest.param("worker/worker.py", "try:\n    import redis.asyncio as r\nexcept ImportError: ...", id="redis"),
        pytest.param("gate.py", "import hiredis", id="hiredis outside the store"),
        pytest.param("store/sync.py", "import msgpack", id="msgpack in the store"),
        pytest.param("core/calls.py", "from .keys import record", id="relative"),
        pytest.param("core/calls.py", "def f(x):\n    return f'ig2:{x}'", id="a key joined elsewhere"),
        pytest.param("helpers.py", "", id="unknown package"),
    ],
)
def test_a_breach_is_named_with_its_place(path: str, source: str) -> None:
    found = violations(path, source)
    assert len(found) == 1, found
    assert found[0].startswith(path)


@for_each(
    ("path", "source"),
    [
        pytest.param(
            "core/keys.py", "PREFIX = 'ig2:'\nfrom idemgate.errors import InvalidArgument", id="the key module"
        ),
        pytest.param("core/codec/__init__.py", "import msgpack", id="msgpack in core"),
        pytest.param("audit/keys.py", "import msgpack", id="msgpack in the audit"),
        pytest.param("gate.py", "from idemgate.gate_aio import AioGate", id="the gate imports its async form"),
        pytest.param("store/aio.py", "import redis.asyncio", id="redis in the store"),
        pytest.param("worker/worker.py", "from idemgate.topics.topic import Topic", id="down"),
        pytest.param("cli/run.py", "from idemgate.gate import Gate", id="down from the top"),
    ],
)
def test_an_import_downward_is_allowed(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_a_circle_is_found_however_long_it_is() -> None:
    sources = {
        "a.py": "from idemgate.b import x",
        "b.py": "def f():\n    from idemgate import c",
        "c.py": "if TYPE_CHECKING:\n    from idemgate.a import y",
        "d.py": "from idemgate.a import y",
    }
    assert circles(module_graph(sources)) == [{"idemgate.a", "idemgate.b", "idemgate.c"}]
