"""Tests that are collected once, and run in a fork of this process for each mutant, until the first one fails.

Only those tests run that come by the changed line, those first that noticed changes of the same file before. A mutant
that cannot be loaded is none. One that is not through in time is tried again alone before it counts as noticed.
`Scripts` knows what is peculiar to mutants of scripts, `tools/mutation/core.py` to those of `idemgate/core`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import pytest
import redis

from idemgate import lua
from idemgate.lua.checked import checked_script
from idemgate.store.embedded.server import ENVIRONMENT, find_server, start
from tools.mutation.operators import Mutant, files
from tools.mutation.tracing import Log, marked, place, wrapped

__all__ = ["Judge", "Say", "Scripts", "Verdict", "judged"]

ROOT = Path(__file__).parents[2]
TESTS = [
    f"tests/{one}.py"
    for one in [
        "guard/test_claims",
        "guard/test_regressions",
        "guard/test_foreign",
        "guard/test_once",
        "guard/test_blocks",
        "guard/test_call",
        "guard/test_batches",
        "topics/test_triggers",
        "topics/test_deliveries",
        "topics/test_dead_letters",
        "topics/test_groups",
        "topics/test_windows",
        "topics/test_priorities",
        "topics/test_limits",
        "topics/test_forwarding",
        "topics/test_partial",
        "topics/test_replays",
        "topics/test_memory",
        "topics/test_merging",
        "topics/test_large",
        "topics/test_refusals",
        "topics/test_registry",
        "topics/test_changes",
        "topics/test_commands",
        "topics/test_encodings",
        "worker/test_members",
        "worker/test_subscribers_list",
        "scripts/test_states",
        "scripts/test_merge",
        "audit/test_audit",
        "audit/test_leftovers",
        "topics/test_model",
        "guard/test_model",
        "topics/test_search",
        "dedup/test_ids",
        "dedup/test_values",
        "guard/test_search",
        "topics/test_events",
        "topics/test_reshard",
        "topics/test_results",
        "topics/test_stale_layouts",
        "topics/test_packed_trigger",
        "guard/test_shared_failures",
        "guard/test_records",
        "security/test_refused_midway",
        "guard/test_history",
        "topics/test_history",
        "topics/test_transfer",
        "presence/test_presence",
        "operate/test_verbs",
    ]
]
"""Those that are about scripts; where nothing is known yet, in this order."""
SKIPPED = (
    "valkey-server", "[awaiting", ", awaiting", "25_bytes", "killed_anywhere", "goes_on_meanwhile", "three_processes",
    "written_nothing[all]",
)  # fmt: skip
"""Parts of names: tests of the other flavour, which sends the same, or of another server; tests that take long and
notice nothing that others do not, or that race."""
PLANTING = ("a_fault_in_a_script_is_found", "planted", "a_new_id_collides")
"""Tests that change scripts themselves."""
LOGS = "IDEMGATE_MUTATION_LOGS"
SLOW = "Timeout (>"


class Verdict(NamedTuple):
    outcome: str
    """killed, timeout, survived, discarded."""
    by: str
    """The first test that failed."""


def judged(judge: Judge[Any]) -> None:
    """Raises RuntimeError where the tests are not green without any mutant."""
    words = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=100", "--no-header", *judge.tests]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", ENVIRONMENT):  # given back at the end
            patch.setenv(name, os.environ.get(name, ""))
        _logging_server(Path(directory))
        code = pytest.main(words, plugins=[judge])
    if judge.red or code:
        raise RuntimeError(f"without any mutant: {judge.red or f'pytest ends with {code}'}")


def _logging_server(directory: Path) -> None:
    """The first server on PATH from here on is one that keeps a log of its own where LOGS names a directory."""
    program = directory / "redis-server"
    log = f'${{{LOGS}:+--loglevel warning --logfile "${LOGS}/$$.log"}}'
    program.write_text(f'#!/bin/sh\nexec {find_server().path} "$@" {log}\n')
    program.chmod(0o700)
    os.environ |= {"PATH": f"{directory}:{os.environ['PATH']}", ENVIRONMENT: str(program)}


# -- in a fork --------------------------------------------------------------------------------------------------------


def _replace(sources: Mapping[str, str], whole: Callable[[str], str] = str) -> None:
    """From here on, in this process, these files say something else."""
    read = lua.source
    lua.source = lambda name: sources.get(name) or read(name)
    for name in lua.names():
        known = lua.script(name)
        changed = lua.Script(name, whole(lua.expand(name)))
        known.text, known.sha = changed.text, changed.sha
        lua._names[changed.sha] = name  # by which `checked_script` finds it
    checked_script.cache_clear()


def _texts(source: str) -> Iterator[tuple[Any, str, str]]:
    """Where a test has a script of its own that is made of this file."""
    for module in [one for name, one in sys.modules.items() if name.startswith("tests.")]:
        for name, text in [*vars(module).items()]:
            if isinstance(text, str) and source in text:
                yield module, name, text


def _compiling(found: Iterable[Mutant]) -> list[Mutant]:
    """Those that a server takes."""

    def compiles(client: redis.Redis, one: Mutant) -> bool:
        try:
            client.script_load(one.source)
        except redis.ResponseError:
            return False
        return True

    with start() as server, redis.Redis.from_url(server.url) as client:
        return [one for one in found if compiles(client, one)]


def _socket(pid: int) -> str:
    """That of the server of this fork."""
    return f"{tempfile.gettempdir()}/idemgate-mutation-{pid}.sock"


def _server() -> str:
    """A server that ends with the process group."""
    socket = _socket(os.getpid())
    program = find_server().path
    os.posix_spawn(program, [program, "--port", "0", "--unixsocket", socket, "--save", ""], os.environ)
    with redis.Redis(unix_socket_path=socket) as client:
        for _ in range(6000):
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return f"unix://{socket}"
            time.sleep(0.005)
    raise TimeoutError(socket)


class _Reports:
    """The failures of a run; of each test how long it took, and what `after` found then."""

    def __init__(self, after: Callable[[], Any]) -> None:
        self.after = after
        self.failed: dict[str, str] = {}
        self.took: Counter[str] = Counter()
        self.seen: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] += report.duration
        if report.failed:
            self.failed.setdefault(report.nodeid, str(report.longrepr))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seen[nodeid] = self.after()


def _run(items: list[pytest.Item], reports: _Reports, *, stop: bool) -> None:
    config = items[0].config
    config.pluginmanager.register(reports)
    for item, following in zip(items, [*items[1:], None], strict=True):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if stop and reports.failed:
            item.session._setupstate.teardown_exact(None)
            return


# -- the session ------------------------------------------------------------------------------------------------------


class _Child(NamedTuple):
    pid: int
    pipe: int
    until: float


_Work = tuple[Any, Callable[[], Any], float]
"""A name; what is done in a fork; after how many seconds nobody waits for it any more."""


def _forked(work: Callable[[], Any], seconds: float) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        os.set_blocking(reading, False)
        return _Child(pid, reading, time.monotonic() + seconds)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        answer = work()
    except BaseException as error:
        answer = {"error": repr(error)}
    with os.fdopen(writing, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _answers(work: Iterable[_Work], jobs: int) -> Iterator[tuple[Any, Any]]:
    """What each of these finds in a fork of its own, as many as `jobs` at a time; None = not in time."""
    waiting, running, read = iter(work), dict[Any, _Child](), defaultdict[Any, bytearray](bytearray)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that it only looks at
    former = signal.signal(signal.SIGTERM, _terminated)  # which would leave them behind, with their servers
    try:
        while True:
            for name, begin, seconds in islice(waiting, jobs - len(running)):
                running[name] = _forked(begin, seconds)
            if not running:
                return
            time.sleep(0.01)
            for name, child in [*running.items()]:
                ended = _drained(child.pipe, read[name])
                if ended or time.monotonic() > child.until:
                    _end(running.pop(name))
                    text = bytes(read.pop(name))
                    yield name, json.loads(text) if ended and text else None
    finally:
        for child in running.values():
            _end(child)
        signal.signal(signal.SIGTERM, former)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _drained(pipe: int, into: bytearray) -> bool:
    """Reads what is there; whether that was the last."""
    while True:
        try:
            found = os.read(pipe, 1 << 20)
        except BlockingIOError:
            return False
        if not found:
            return True
        into += found


def _end(child: _Child) -> None:
    os.close(child.pipe)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with its server
    os.waitpid(child.pid, 0)
    Path(_socket(child.pid)).unlink(missing_ok=True)  # its server had no time to


class Change(Protocol):
    """A mutant."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


One = TypeVar("One", bound=Change)
Say = Callable[[One, Verdict], None]


class Judge(ABC, Generic[One]):
    """A pytest plugin: instead of running what was collected, it judges mutants by it."""

    tests: ClassVar[list[str]]
    """Where nothing is known yet, in this order."""
    skipped: ClassVar[tuple[str, ...]] = SKIPPED
    none: One
    """No mutant: judged as all others are, it must survive."""

    def __init__(self, found: Iterable[One], jobs: int, budget: float, minutes: float, say: Say[One]) -> None:
        self.until = time.monotonic() + 60 * minutes
        self.found = list(found)
        self.jobs = jobs
        self.budget = budget
        self.say = say
        self.red = ""
        self.verdicts: dict[One, Verdict] = {}
        self.items: dict[str, pytest.Item] = {}
        self.took: Counter[str] = Counter()
        self.comes_by: defaultdict[str, set[str]] = defaultdict(set)
        self.killers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.best: Counter[str] = Counter()

    @abstractmethod
    def sound(self, found: list[One]) -> list[One]:
        """Those that can be loaded at all."""

    @abstractmethod
    def tracing(self, directory: Path) -> Callable[[], list[str]]:
        """In a fork, makes the code tell by which lines a test comes; what tells those since it was asked last."""

    @abstractmethod
    def change(self, one: One) -> None:
        """In a fork, makes the change."""

    @abstractmethod
    def reaching(self, one: One) -> set[str]:
        """The tests that come by its line."""

    def naming(self, one: One) -> set[str]:
        """Those of them that are about what is changed, though they may run nothing of it."""
        return set()

    @abstractmethod
    def traced(self) -> list[str]:
        """The texts on which a trace depends."""

    def check_trace(self) -> None:
        """Says in `red` what is wrong with it."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        # Nothing is looked for that is smaller, or remembered from one mutant to the next.
        settings.register_profile("mutation", deadline=None, database=None, derandomize=True,
            phases=[Phase.explicit, Phase.generate])  # fmt: skip
        settings.load_profile("mutation")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(part in item.nodeid for part in self.skipped)]
        self.items = {item.nodeid: item for item in items}

    def pytest_runtestloop(self) -> bool:
        with tempfile.TemporaryDirectory() as directory:
            self._trace(Path(directory))
        if not self.red:
            loading = {*self.sound(self.found)}
            self.verdicts |= {one: Verdict("discarded", "") for one in self.found if one not in loading}
            self._judge([self.none, *(one for one in self.found if one in loading)], self.jobs)
            late = [one for one, verdict in self.verdicts.items() if verdict.outcome == "timeout"]
            self._judge(late, 1)
        return True

    # Which tests come by which line; and whether all are green.

    def _trace(self, directory: Path) -> None:
        known = Path(tempfile.gettempdir()) / f"idemgate-mutation-{self._fingerprint()}.json"
        if not known.exists():
            found = self._traces(directory)
            if self.red:
                return
            known.write_text(json.dumps(found))
        for found in json.loads(known.read_text()):
            self.took.update(found["took"])
            for name, lines in found["seen"].items():
                for line in lines:
                    self.comes_by[line].add(name)
        self.check_trace()

    def _traces(self, directory: Path) -> list[Any]:
        work = [
            (n, self._traced(part, directory / str(n)), 3600.0) for n, part in enumerate(self._halves([*self.items]))
        ]
        every, shared, failed = [], defaultdict[tuple[str, str], set[str]](set), dict[str, str]()
        for _, found in _answers(work, self.jobs):
            if not found or found.get("error"):
                self.red = f"tracing: {found}"
                return []
            every.append(found)
            failed |= found["failed"]
            for name, lines in found["seen"].items():
                shared[_scene(name)].update(lines)
        if failed:
            self._check(failed)
        return [
            {"took": one["took"], "seen": {name: sorted(shared[_scene(name)]) for name in one["seen"]}} for one in every
        ]

    def _check(self, failed: dict[str, str]) -> None:
        """What fails where lines are told of must not do so where they are not."""
        for _, found in _answers([("plain", self._plain([*failed]), 3600.0)], 1):
            if not found or found.get("error") or found["failed"]:
                self.red = f"{found}"

    def _halves(self, names: list[str]) -> list[list[str]]:
        """Whole files, about as many tests each."""
        parts: list[list[str]] = [[] for _ in range(self.jobs)]
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[name.partition("::")[0]].append(name)
        for own in sorted(by_file.values(), key=len, reverse=True):
            min(parts, key=len).extend(own)
        return parts

    def _traced(self, names: list[str], directory: Path) -> Callable[[], Any]:
        def work() -> Any:
            directory.mkdir()
            reports = _Reports(self.tracing(directory))
            _run([self.items[name] for name in names], reports, stop=False)
            return {"failed": reports.failed, "took": reports.took, "seen": reports.seen}

        return work

    def _plain(self, names: list[str]) -> Callable[[], Any]:
        def work() -> Any:
            reports = _Reports(lambda: None)
            _run([self.items[name] for name in names], reports, stop=False)
            return {"failed": reports.failed}

        return work

    # The mutants.

    def _judge(self, found: list[Mutant], jobs: int) -> None:
        work = ((one, self._trial(one), self._seconds(one)) for one in found if time.monotonic() < self.until)
        for one, answer in _answers(work, jobs):
            if answer is None:
                verdict = Verdict("timeout", "")
            elif answer.get("error"):
                verdict = Verdict("killed", answer["error"])
            elif answer.get("unsound"):
                verdict = Verdict("discarded", answer["unsound"])
            elif not answer["failed"]:
                verdict = Verdict("survived", "" if self._tests(one) else "no test comes by")
            else:
                name, text = next(iter(answer["failed"].items()))
                verdict = Verdict("timeout" if SLOW in text else "killed", name)
                self.killers[one.file][name] += 1
                self.best[name] += 1
            if one is not self.none:
                self.verdicts[one] = verdict
                self.say(one, verdict)
            elif verdict.outcome != "survived":
                self.red = f"{verdict} {answer}"
                return

    def _tests(self, one: Mutant) -> list[str]:
        names = [*self._mixed(list(self.items))] if one is self.none else self._ordered(one)
        if not self.budget:
            return names
        quick = [name for name in names if self.took[name] < self.budget / 8] or names  # one must not use it up alone
        spent = accumulate((self.took[name] for name in quick), initial=0.0)
        return [name for name, before in zip(quick, spent, strict=False) if before < self.budget]

    def _ordered(self, one: One) -> list[str]:
        """In turn one that noticed changes before, one that comes by lines close by, by which few come, and any."""
        reached = self.reaching(one)
        known = [name for name, _ in self.killers[one.file].most_common(12) + self.best.most_common(40)]
        near = defaultdict[str, float](float)
        for line in range(one.line - 3, one.line + 6):
            tests = self.comes_by.get(f"{one.file}:{line}", set())
            for name in tests:
                near[name] += 1 / len(tests)
        for name in self.naming(one):
            near[name] += 1
        close = sorted(reached, key=lambda name: (self.took[name] + 0.02) / (near[name] + 1e-6))
        turns = zip_longest((name for name in known if name in reached), close, self._mixed([*reached]))
        return [*dict.fromkeys(filter(None, chain.from_iterable(turns)))]

    def _mixed(self, names: list[str]) -> Iterator[str]:
        """Of each file one after the other, the quick ones first: what differs most from test to test notices most."""
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=lambda name: (self.took[name], name)):
            by_file[name.partition("::")[0]].append(name)
        turns = chain.from_iterable(zip_longest(*by_file.values()))
        return filter(None, turns)

    def _seconds(self, one: Mutant) -> float:
        return 60 + 6 * sum(self.took[name] for name in self._tests(one))

    def _trial(self, one: Mutant) -> Callable[[], Any]:
        names = self._tests(one)

        def work() -> Any:
            os.environ["IDEMGATE_TEST_URL"] = _server()
            if one is not self.none:
                try:
                    self.change(one)
                except Exception as error:
                    return {"unsound": repr(error)}
            reports = _Reports(lambda: None)
            if names:
                _run([self.items[name] for name in names], reports, stop=True)
            return {"failed": reports.failed}

        return work

    def _fingerprint(self) -> str:
        """Of all that a trace depends on."""
        tests = {ROOT / name.partition("::")[0] for name in self.items}
        texts = [path.read_text() for path in sorted(tests)] + self.traced()
        return hashlib.sha256("\0".join([*sorted(self.items), *texts]).encode()).hexdigest()[:16]


class Scripts(Judge[Mutant]):
    """Of mutants of scripts."""

    tests = TESTS
    skipped = (*SKIPPED, *PLANTING)
    none = Mutant("lib/now", 1, "none", "", "")

    def sound(self, found: list[Mutant]) -> list[Mutant]:
        return _compiling(found)

    def tracing(self, directory: Path) -> Callable[[], list[str]]:
        os.environ[LOGS] = str(directory)
        log = Log(directory)
        _replace({name: marked(name, lua.source(name)) for name in files()}, wrapped)
        return lambda: sorted(log.lines())

    def change(self, one: Mutant) -> None:
        source, changed = lua.source(one.file), one.source
        for module, name, text in _texts(source):
            setattr(module, name, text.replace(source, changed))
        _replace({one.file: changed})

    def reaching(self, one: Mutant) -> set[str]:
        """Return the tests that run the line, and those of modules with a script that contains the file."""
        own = {module.__file__ for module, _, _ in _texts(lua.source(one.file))}
        whole = {name for name, item in self.items.items() if str(item.path) in own}
        return self.comes_by[place(one.file, one.line, lua.source(one.file))] | whole

    def traced(self) -> list[str]:
        return [lua.source(name) for name in files()]

    def check_trace(self) -> None:
        unseen = {*lua.names()} - {line.partition(":")[0] for line in self.comes_by}
        if len(unseen) > len(lua.names()) / 4:
            self.red = f"no test comes by {sorted(unseen)}: is tracing broken?"


def _scene(name: str) -> tuple[str, str]:
    """Tests of one file with the same parameters share what was made for them."""
    return name.partition("::")[0] if "[" in name and "test_states" in name else name, name.partition("[")[2]
