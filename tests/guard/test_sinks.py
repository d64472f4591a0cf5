"""A guard with a sink, on a sink in memory. `integrations/sql/tests` has the same with databases, and kills."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from idemgate import AlreadyInProgress, Gate, InvalidArgument
from idemgate.core import keys
from idemgate.testing import Clock
from idemgate.types import AioSink, Sink, SinkEntry, StoredResult

Name = tuple[str, str]


class Memory:
    """A sink that keeps rows in this process. `fails` are raised, one by one, where a commit would."""

    def __init__(self) -> None:
        self.rows: dict[Name, StoredResult] = {}
        self.entries: list[SinkEntry] = []
        self.fails: list[Exception] = []
        self.busy = False

    def begin(self, entry: SinkEntry) -> StoredResult | None:
        self.entries.append(entry)
        if self.busy:
            raise AlreadyInProgress(entry.key, 0.5, entry.scope)
        return self.rows.get((entry.scope, entry.key))

    def commit(self, entry: SinkEntry, result: StoredResult) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.rows[entry.scope, entry.key] = result

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        if (stored := self.begin(entry)) is None:
            self.commit(entry, work())
        return stored


class AioMemory(Memory):
    async def apply(  # type: ignore[override]
        self, entry: SinkEntry, work: Callable[[], Awaitable[StoredResult]]
    ) -> StoredResult | None:
        if (stored := self.begin(entry)) is None:
            self.commit(entry, await work())
        return stored


class Case:
    """A guarded handler in one flavour. Its calls are awaited in both."""

    def __init__(self, gate: Gate, sink: Any, **options: Any) -> None:
        self.gate, self.sink = gate, sink
        self.guard = gate.guard("pay", sink=sink, **options)
        self.runs = 0
        self.result: object = "paid"

    def work(self) -> object:
        self.runs += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def work_async(self) -> object:
        return self.work()

    async def pay(self, key: Any = "p1", **options: Any) -> Any:
        if isinstance(self.sink, AioMemory):
            return await self.guard.aio.run(key, self.work_async, **options)
        return await asyncio.to_thread(self.guard.run, key, self.work, **options)


@pytest.fixture(params=[Memory, AioMemory], ids=["blocking", "awaiting"])
def sink(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_the_sinks_of_this_module_are_sinks() -> None:
    _blocking: Sink = Memory()
    _awaiting: AioSink = AioMemory()


async def test_a_sink_gets_the_names_that_the_record_has(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    await case.pay(7, fingerprint={"amount": 5})
    [entry] = sink.entries
    assert keys.record(gate.namespace, "pay", 7).endswith(f"{entry.key}}}".encode())
    assert entry[:2] == (f"{gate.namespace}:pay", "7")
    assert len(entry.fingerprint) == 16
    assert (entry.token, entry.retention) == (gate.inspect(7, scope="pay").token, 86_400.0)


async def test_keys_that_differ_have_rows_that_differ(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    long = "k" * 300
    given = ["a:b", "a%3Ab", "a b", "a%20b", b"\xff", "%FF", long, keys._escape(long.encode()).decode(), "#"]
    for key in given:
        assert (await case.pay(key)).outcome == "handled"
    assert len(sink.rows) == case.runs == len(given)
    # And 7 and "7" are one key, as in Redis
    await case.pay(7)
    gate.forget("7", scope="pay")
    assert (await case.pay("7")).outcome == "duplicate"


async def test_a_stored_result_is_replayed_and_stored_in_redis(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    await case.pay()
    gate.forget("p1", scope="pay")
    again = await case.pay()
    assert (again.outcome, again.value, again.ran, case.runs) == ("duplicate", "paid", False, 1)
    assert gate.inspect("p1", scope="pay").value == "paid"
    assert gate.counters["once.sink_replayed"] == 1


async def test_a_commit_that_fails_frees_the_key(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    sink.fails.append(ConnectionError("commit"))
    failed = await case.pay()
    assert (failed.outcome, failed.ran, str(failed.error)) == ("failed", True, "commit")
    assert gate.inspect("p1", scope="pay").state == "released"
    case.result = "paid again"
    assert (await case.pay()).value == "paid again"


async def test_a_busy_row_is_in_progress_and_no_attempt(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink, max_attempts=1, on_error="keep")
    sink.busy = True
    for _ in range(2):
        busy = await case.pay()
        assert (busy.outcome, busy.retry_after, busy.ran) == ("in_progress", 0.5, False)
    assert gate.counters["once.sink_busy"] == 2
    sink.busy = False
    assert (await case.pay()).outcome == "handled"


async def test_a_committed_run_is_handled_even_if_its_lease_was_lost(gate: Gate, clock: Clock, sink: Any) -> None:
    case = Case(gate, sink, on_lost="raise")
    commit = sink.commit

    def lose(entry: SinkEntry, result: StoredResult) -> None:
        commit(entry, result)
        gate.forget("p1", scope="pay", force=True)

    sink.commit = lose
    assert (await case.pay()).outcome == "handled"
    assert gate.counters["once.lost"] == 1


async def test_another_fingerprint_is_refused_and_frees_the_key(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink, on_error="keep")
    await case.pay(fingerprint=1)
    gate.forget("p1", scope="pay")
    assert (await case.pay(fingerprint=2)).outcome == "rejected"
    assert gate.inspect("p1", scope="pay").state == "released"
    assert case.runs == 1


async def test_a_handler_that_raises_is_not_stored(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    case.result = ConnectionError("the bank is closed")
    assert (await case.pay()).outcome == "failed"
    assert sink.rows == {}


async def test_a_result_that_holds_unfinished_work_is_rolled_back(gate: Gate, sink: Any) -> None:
    case = Case(gate, sink)
    case.result = [Future[None]()]
    verdict = await case.pay()
    assert (verdict.outcome, type(verdict.error)) == ("rejected", InvalidArgument)
    assert sink.rows == {}
    assert gate.inspect("p1", scope="pay").state == "released"


class Suppressing(Memory):
    """A sink that suppresses the error of the handler, as a transaction of psycopg does with its Rollback."""

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        with suppress(ConnectionError):
            return super().apply(entry, work)
        return None


class AioSuppressing(AioMemory):
    async def apply(  # type: ignore[override]
        self, entry: SinkEntry, work: Callable[[], Awaitable[StoredResult]]
    ) -> StoredResult | None:
        with suppress(ConnectionError):
            return await super().apply(entry, work)
        return None


@pytest.mark.parametrize("kind", [Suppressing, AioSuppressing])
async def test_a_sink_that_suppresses_the_error_of_the_handler_is_no_success(gate: Gate, kind: type[Memory]) -> None:
    case = Case(gate, kind())
    case.result = ConnectionError("the bank is closed")
    failed = await case.pay()
    assert failed.outcome == "failed"
    assert isinstance(failed.error, RuntimeError)
    assert "Let apply() raise what work() raises" in str(failed.error)
    assert gate.inspect("p1", scope="pay").state == "released"
    case.result = "paid"
    assert (await case.pay()).value == "paid"


@pytest.mark.parametrize("options", [{"at_most_once": True}, {"shadow": True}, {"on_error": "store"}, {"sink": Memory}])
def test_a_class_as_sink_and_options_without_a_meaning_are_refused(gate: Gate, options: Any) -> None:
    options = {"sink": Memory(), **options}
    with pytest.raises(InvalidArgument, match=list(options)[-1]):
        gate.once(key="{key}", **options)
    with pytest.raises(InvalidArgument, match=list(options)[-1]):
        gate.guard("pay", **options)


def test_once_above_merge_takes_no_sink(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="sink"):

        @gate.once(key="{key}", sink=Memory())
        @gate.merge(key="{key}", window="1s")
        def pay(key: str) -> None: ...
