"""One real server a test process, a fresh namespace a test, and the two flavours of every behaviour.

`IDEMGATE_TEST_URL` names another server to run on; else one is started, of the program in `IDEMGATE_SERVER` if that is
set, and ends with the tests. With `IDEMGATE_TEST_PROTOCOL=3` its URL asks for RESP3, and with
`IDEMGATE_TEST_ROLES=guard,producer` the gate of a test logs in as a user with the access list of these roles
(`tools/roles.py`). With `IDEMGATE_TEST_LOOP=uvloop` every event loop is one of uvloop.

Tests of faults say what they did with `record_fault`, and draw what is left to chance from `drawn`
(`tests/plugins/seeds.py`).
`IDEMGATE_FAULTS` is how many of each fault they inject (`tools/reliability.py`).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any

import pytest
import redis
from hypothesis import settings

from idemgate import Gate
from idemgate.cli.acl_rules import rule, user_name
from idemgate.guard.claim import Claim
from idemgate.presence import presence
from idemgate.store import retry, sync
from idemgate.store.embedded.server import ENVIRONMENT, Binary, _candidates, _inspect_binary, find_server, start
from idemgate.store.sync import Waiter
from idemgate.testing import Clock, audit
from idemgate.topics.dead_letters import DeadLetters
from idemgate.topics.topic import Topic
from tests.needs import report_missing
from tools import reliability

PASSWORD = "c4n4ry-p455w0rd"
"""Of the users that tests make; it is not to be seen in any log, text or error."""
_numbers = itertools.count()
# How long an example takes is the machine's affair: no test measures time.
settings.register_profile(
    "idemgate", deadline=None, database=None, max_examples=int(os.environ.get("IDEMGATE_EXAMPLES", "10"))
)
settings.load_profile("idemgate")


def pytest_configure(config: pytest.Config) -> None:
    if loop := os.environ.get("IDEMGATE_TEST_LOOP"):
        asyncio.set_event_loop_policy(import_module(loop).EventLoopPolicy())
    # Hypothesis looks for references to its generator. Since Python 3.14 it finds none among the objects that are
    # exempt from garbage collection.
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random` was passed")
    gc.disable()  # until all is collected: nothing of it is garbage, and looking for some takes a fifth of the time
    if redis.__version__.startswith("5.0."):
        # It leaves the sockets of failed connections to the garbage collector.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection. Each collection would visit 450,000 objects, in 0.4 s."""
    gc.freeze()
    gc.enable()


# Gates of this process report after an hour: tests compare all keys of the server, and count commands. `tests/presence`
# sends reports, and so do the processes that tests start.
presence.FIRST_AFTER = 3600.0
# A process warns once of a blocking call in an event loop: by chance in a test that reads the log.
sync._has_warned = True


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The server of this test process."""
    given = os.environ.get("IDEMGATE_TEST_URL")
    if given:
        yield given
        return
    protocol = os.environ.get("IDEMGATE_TEST_PROTOCOL")
    with start() as server:
        yield server.url + (f"?protocol={protocol}" if protocol else "")


@pytest.fixture(scope="session")
def raw(url: str) -> Iterator[Any]:
    """A plain client of the same server, to look at keys and to break things; replies have the shapes of RESP2.

    redis-py gives up after five seconds, also on a command that blocks for longer.
    """
    with redis.Redis.from_url(url.removesuffix("?protocol=3"), socket_timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """The PostgreSQL server of this test process, or a skip that says how to install it."""
    reason = "no psycopg with its C library here: pip install 'psycopg[binary]'"
    pytest.importorskip("psycopg", reason=reason, exc_type=ImportError)
    from tests.postgres import Postgres, find_programs

    programs = find_programs()
    if programs is None:
        report_missing("postgresql")
    server = Postgres(programs)
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: Any) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    with postgres.lend_database() as url:
        yield url


@pytest.fixture
def has_waitaof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this test are the suite's, or where that is too old, that of a wheel."""
    found: list[Binary | str] = [find_server()]
    if ENVIRONMENT not in os.environ:
        found += [_inspect_binary(path, source) for path, source in _candidates()]
    able = [one for one in found if isinstance(one, Binary) and tuple(map(int, one.version.split("."))) >= (7, 2)]
    if not able:
        pytest.skip("this server has no WAITAOF")
    monkeypatch.setenv(ENVIRONMENT, able[0].path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def namespace() -> str:
    return f"t{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def sound(request: pytest.FixtureRequest) -> Callable[[Gate], None]:
    """`sound(gate)`: its whole namespace is as it must be. A test that damages it on purpose says
    `@pytest.mark.damages("wrong-type")`, the kinds of faults that are then found."""
    damages = {kind for mark in request.node.iter_markers("damages") for kind in mark.args}

    def check(gate: Gate) -> None:
        report = audit(gate)
        assert {*report.by_kind} <= damages, str(report)

    return check


@pytest.fixture
def users(raw: Any, url: str, namespace: str) -> Iterator[Callable[..., str]]:
    """`users("guard", ...)` makes a user of these roles in the test's namespace and gives its URL.

    Servers from 7.2 on get the rule for these: a gate uses their commands if they have them."""
    made: list[str] = []

    def make(*roles: str, tenant: str = namespace, **options: Any) -> str:
        name, version = user_name(roles, tenant), raw.info("server")["redis_version"]
        since_7_2 = tuple(map(int, version.split(".")[:2])) >= (7, 2)
        raw.execute_command(*rule(roles, tenant, name, **{"since_7_2": since_7_2, **options}))
        raw.execute_command("ACL", "SETUSER", name, f">{PASSWORD}")
        made.append(name)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{name}:{PASSWORD}@{rest}"

    yield make
    if made:
        raw.execute_command("ACL", "DELUSER", *made)


@pytest.fixture
def entry(url: str, namespace: str, request: pytest.FixtureRequest) -> str:
    """The URL by which the gates of a test log in: as a user who may do all, or as a user of the roles in
    IDEMGATE_TEST_ROLES, to whom the names that tests make up outside of the namespace are given, too."""
    roles = [role for role in os.environ.get("IDEMGATE_TEST_ROLES", "").split(",") if role]
    if not roles:
        return url
    named = {"keys": [f"{namespace}*", f"jobs-{namespace}*"], "channels": [f"{namespace}*", f"{namespace}.*"]}
    theirs = named if {"worker", "subscriber", "admin"} & {*roles} else {}
    return str(request.getfixturevalue("users")(*roles, **theirs))


@pytest.fixture
async def gate(
    entry: str, url: str, raw: Any, clock: Clock, namespace: str, sound: Callable[[Gate], None]
) -> AsyncIterator[Gate]:
    """A gate on a namespace of its own, whose time is `clock`; audited at the end of each test.

    An audit scans the whole server, so the keys of the test are deleted after it.
    """
    made = Gate(entry, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()
    if raw.dbsize():
        with Gate(url, namespace=namespace, clock=clock) as admin:  # not every role may audit
            sound(admin)
    if "IDEMGATE_TEST_URL" not in os.environ:
        raw.flushdb()


@pytest.fixture
async def small(entry: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    """A gate of the same namespace that decodes 1,000 bytes at most."""
    made = Gate(entry, namespace=namespace, clock=clock, max_bytes=1_000)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture(params=["blocking", "awaiting"])
def face(request: pytest.FixtureRequest, gate: Gate) -> Face:
    """The gate through one of its faces; every method is awaited, in both flavours."""
    return Face(gate, request.param == "awaiting")


class Face:
    """`await face.claim("k")`, `topic = face.topic("t", window="60s")`, `await topic.trigger("k", 1)`, in both
    flavours."""

    def __init__(self, gate: Gate, awaiting: bool) -> None:
        self.gate = gate
        self.awaiting = awaiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gate.aio, name) if self.awaiting else getattr(Awaited(self.gate), name)

    def topic(self, name: str, **policy: Any) -> Any:
        made = self.gate.topic(name, **policy)
        return made.aio if self.awaiting else Awaited(made)

    def dedup(self, scope: str, retention: Any) -> Any:
        made = self.gate.dedup(scope, retention)
        return made.aio if self.awaiting else Awaited(made)

    def once(self, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`gate.once` on a plain function; the result is awaited. The awaiting flavour guards an `async def` with the
        same signature, whose body runs in a thread, so that a body may block in both."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            if not self.awaiting:
                guarded = self.gate.once(*args, **options)(body)
                return lambda *a, **k: asyncio.to_thread(guarded, *a, **k)

            return self.gate.once(*args, **options)(_in_thread(body))

        return decorate

    def guard(self, scope: str, **options: Any) -> FaceGuard:
        """`await face.guard("orders").run("k", body, message)`, where `body` is a plain function in both flavours."""
        return FaceGuard(self.gate.guard(scope, **options), self.awaiting)

    @asynccontextmanager
    async def inside(self, key: Any, **options: Any) -> AsyncIterator[Any]:
        """`with gate.claim(...)` or `async with gate.aio.claim(...)`; the claim's methods are awaited in both."""
        if self.awaiting:
            async with self.gate.aio.claim(key, **options) as claim:
                yield claim
        else:
            with self.gate.claim(key, **options) as claim:
                yield Awaited(claim)


class FaceGuard:
    """The guard of a consumer in one flavour. Bodies run in threads, so they may block in both."""

    def __init__(self, guard: Any, awaiting: bool) -> None:
        self.guard = guard
        self.awaiting = awaiting

    async def run(self, key: Any, body: Callable[..., Any], *message: Any, **options: Any) -> Any:
        if not self.awaiting:
            return await asyncio.to_thread(self.guard.run, key, body, *message, **options)
        return await self.guard.aio.run(key, _in_thread(body), *message, **options)

    async def run_many(self, messages: Any, body: Callable[..., Any], **options: Any) -> Any:
        if not self.awaiting:
            return await asyncio.to_thread(self.guard.run_many, messages, body, **options)
        return await self.guard.aio.run_many(messages, _in_thread(body), **options)


def _in_thread(body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body)
    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(body, *args, **kwargs)

    return awaiting


class Awaited:
    """A blocking object whose methods are awaited; they run in a thread."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if isinstance(found, DeadLetters):
            return Awaited(found)
        if not callable(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await asyncio.to_thread(found, *args, **kwargs)
            return Awaited(result) if isinstance(result, Claim | Topic) else result

        return call


@pytest.fixture
def three_tries(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """`with three_tries():` a call gives up after three tries. Each has seconds for its answer."""

    @contextmanager
    def limit() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(retry, "retry_pause", lambda tries: 0.0 if tries < 3 else 60.0)
            yield

    return limit


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each waiter sleep for an hour. Only a wake-up ends that, so a test that goes on shows a
    wake-up, however slow the machine is."""

    def wait(self: Waiter, seconds: float) -> bool:
        return waiter_wait(self, 3600)

    async def wait_for_wakeup(wake: asyncio.Event, seconds: float) -> None:
        await wake.wait()
        wake.clear()

    waiter_wait = Waiter.wait
    monkeypatch.setattr(Waiter, "wait", wait)
    for module in ("idemgate.guard.claim", "idemgate.guard.call"):
        monkeypatch.setattr(import_module(module), "wait_for_wakeup", wait_for_wakeup)
    monkeypatch.setattr(import_module("idemgate.worker.poller"), "POLL", 3600.0)


# -- faults -----------------------------------------------------------------------------------------------------------

FAULTS = int(os.environ.get("IDEMGATE_FAULTS", "0"))
_FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the tests for this server; where rows are wanted, only the tests that record some."""
    wanted = [item for item in items if all(_fits(*mark.args, **mark.kwargs) for mark in item.iter_markers("servers"))]
    if reliability.ROWS in os.environ:
        wanted = [item for item in wanted if "record_fault" in getattr(item, "fixturenames", ())]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[*{*items} - {*wanted}])
        items[:] = wanted


def _fits(since: str = "0", below: str = "999") -> bool:
    """Whether the fixture `url` is a server of these versions. A Valkey reports that of a compatible Redis."""
    return _numbers_of(since) <= _server_version() < _numbers_of(below)


@functools.cache
def _server_version() -> tuple[int, ...]:
    if given := os.environ.get("IDEMGATE_TEST_URL"):
        with redis.Redis.from_url(given) as client:
            return _numbers_of(client.info("server")["redis_version"])
    return _numbers_of(find_server().version)


def _numbers_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def many() -> Callable[[int], int]:
    """`many(5)`: five of a fault in the usual suite, IDEMGATE_FAULTS of it in a large run."""
    return lambda few: max(few, FAULTS)


@pytest.fixture
def record_fault(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Says what was broken, and how often: `record_fault("reply lost", 40, promises="P6", lost=0)`. A row of
    `docs/reliability.md`; rows of the same fault are added up."""
    rows: list[reliability.Row] = []
    test = request.node.nodeid.partition("[")[0]

    def record(
        fault: str,
        n: int,
        *,
        promises: str = "",
        violations: int = 0,
        exhaustive: bool = False,
        seed: int | None = None,
        server: str | None = None,
        **figures: float | str,
    ) -> None:
        """`promises`: "P1 P6". `exhaustive`: the N are all cases there are. `server`: kind and version, None: those
        of the fixture `url`."""
        used = server or (reliability.server_of(request.getfixturevalue("url")) if reliability.wanted() else "")
        row = {
            "fault": fault,
            "test": test,
            "n": n,
            "promises": promises.split(),
            "violations": violations,
            "exhaustive": exhaustive,
            "seed": seed,
            "server": used,
            "figures": figures,
        }
        rows.append(row)
        shown = "".join(f" {name}={value}" for name, value in figures.items())
        print(f"FAULT {fault} N={n}{shown}" + ("" if seed is None else f" seed={seed}"))

    yield record
    passed = not request.node.stash.get(_FAILED, True)
    if not passed and not rows:
        record(f"not counted: {test}", 0, server="-")
    if reliability.wanted():
        reliability.note({**row, **reliability.surroundings(), "passed": passed} for row in rows)
