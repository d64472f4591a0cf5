"""`gate.callback(on_verdict=)`: manual acknowledgements by the verdict."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from idemgate import Bury, Gate, InvalidArgument, Verdict

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Declined(Exception):
    pass


class Channel:
    """Stands for the channel of pika: it records how each delivery was settled."""

    def __init__(self) -> None:
        self.settled: list[Call] = []

    def settle(self, verdict: Verdict[Any], *message: Any, **named: Any) -> None:
        self.settled.append((verdict.action, message, named))

    async def settle_async(self, verdict: Verdict[Any], *message: Any, **named: Any) -> None:
        await asyncio.sleep(0)
        self.settle(verdict, *message, **named)


def run(message: str, number: int = 0) -> str:
    if message == "fails":
        raise Declined("no")
    if message == "buried":
        raise Bury("broken")
    return message


async def run_async(message: str, number: int = 0) -> str:
    return run(message, number)


@pytest.fixture(params=["blocking", "awaiting"])
def awaiting(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "awaiting")


def build(gate: Gate, channel: Channel, awaiting: bool, **options: Any) -> Any:
    """Return an async function that calls the guarded callback of either kind."""
    if awaiting:
        return gate.callback("{message}", scope="s", on_verdict=channel.settle_async, **options)(run_async)
    callback = gate.callback("{message}", scope="s", on_verdict=channel.settle, **options)(run)

    async def call(*args: Any, **kwargs: Any) -> Any:
        return callback(*args, **kwargs)

    return call


async def test_each_outcome_is_settled_with_the_arguments_of_the_callback(gate: Gate, awaiting: bool) -> None:
    # Given a callback of a library with manual acknowledgements
    channel = Channel()
    callback = build(gate, channel, awaiting)
    gate.claim("busy", scope="s")
    # When messages of each kind arrive
    assert await callback("good", number=1) == "good"
    assert await callback("good", number=2) == "good"
    for message in ["busy", "buried", "fails", ""]:
        assert await callback(message) is None
    # Then each is settled once, and nothing was raised into the loop of the library
    assert channel.settled == [
        ("ack", ("good",), {"number": 1}),
        ("ack", ("good",), {"number": 2}),
        ("retry", ("busy",), {}),
        ("reject", ("buried",), {}),
        ("retry", ("fails",), {}),
        ("reject", ("",), {}),
    ]
    assert gate.counters["callback.failed"] == 1


async def test_the_error_of_the_function_is_logged_unless_it_is_to_be_raised(
    gate: Gate, awaiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel()
    await build(gate, channel, awaiting)("fails")
    assert "callback.failed" in caplog.text
    with pytest.raises(Declined):
        await build(gate, channel, awaiting, on_failure="raise")("fails")
    assert [action for action, *_ in channel.settled] == ["retry", "retry"]


async def test_an_error_of_the_settlement_is_raised_and_the_work_stays_done(gate: Gate, awaiting: bool) -> None:
    # Given a channel that is closed
    class Closed(Channel):
        def settle(self, verdict: Verdict[Any], *message: Any, **named: Any) -> None:
            raise ConnectionError("the channel is closed")

    with pytest.raises(ConnectionError):
        await build(gate, Closed(), awaiting)("good")
    # Then the redelivered message is a duplicate
    channel = Channel()
    await build(gate, channel, awaiting)("good")
    assert gate.counters["callback.duplicate"] == 1
    assert channel.settled == [("ack", ("good",), {})]


def test_threads_of_a_library_settle_each_copy_once(gate: Gate) -> None:
    channel = Channel()
    callback = gate.callback("{message}", scope="s", on_verdict=channel.settle)(run)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: callback(f"m{number % 20}", number), range(200)))
    assert sorted(message[1] for _, message, _ in channel.settled) == list(range(200))
    assert gate.counters["callback.handled"] == 20


async def test_an_async_settlement_of_a_blocking_callback_is_refused(gate: Gate) -> None:
    settle: Any = Channel().settle_async
    with pytest.raises(InvalidArgument, match="on_verdict"):
        gate.callback("{message}", on_verdict=settle)(run)
    invalid: Any = "ack"
    with pytest.raises(InvalidArgument, match="on_verdict"):
        gate.callback("{message}", on_verdict=invalid)(run)


async def test_a_plain_settlement_of_an_async_callback_is_called(gate: Gate) -> None:
    channel = Channel()
    await gate.callback("{message}", scope="s", on_verdict=channel.settle)(run_async)("good")
    assert channel.settled == [("ack", ("good",), {})]
