"""`gate.run()` as a whole process: what SIGTERM and SIGINT do to it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

import pytest

from idemgate import Gate
from tests.waiting import wait_until

ENDED = "SIGTERM or SIGINT to a worker process in the middle of a handler"
PROGRAM = """
import asyncio, sys, threading, time
from idemgate import Gate

gate = Gate(sys.argv[1], namespace=sys.argv[2])
topic = gate.topic("t", lease="30s")

def say(*words):
    print(*words, flush=True)

def wait_for_line():
    return sys.stdin.readline()

async def waiting(delivery):
    say("started", delivery.key)
    await asyncio.to_thread(wait_for_line)
    say("finished", delivery.key)

async def endless(delivery):
    say("started", delivery.key)
    try:
        await asyncio.Event().wait()
    finally:
        say("cancelled", delivery.key)

def stuck(delivery):
    say("started", delivery.key)
    time.sleep(3600)

async def swallowing(delivery):
    say("started", delivery.key)
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass

async def threading_(delivery):
    say("started", delivery.key)
    await asyncio.to_thread(stuck, delivery)

topic.handler({
    "waiting": waiting, "endless": endless, "stuck": stuck, "swallowing": swallowing, "to_thread": threading_,
}[sys.argv[3]])
gate.run(concurrency=1, grace=sys.argv[4])
say("over")
"""


class Program:
    """A worker process that says what it does, line by line."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.out: IO[str] = self.process.stdout

    def says(self) -> str:
        return self.out.readline().strip()

    def rest(self, within: float = 60) -> tuple[int, str, str]:
        """Its exit code, and what else it said."""
        out, err = self.process.communicate(timeout=within)
        return self.process.returncode, out.strip(), err


@pytest.fixture
def program(url: str, namespace: str) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def start(handler: str, grace: str = "30s") -> Program:
        made.append(Program(url, namespace, handler, grace))
        return made[-1]

    yield start
    for one in made:
        with suppress(ProcessLookupError):
            one.process.kill()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        one.process.wait()


@pytest.fixture
def topic(url: str, namespace: str) -> Iterator[Any]:
    with Gate(url, namespace=namespace) as gate:
        yield gate.topic("t")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_what_runs_finish(
    topic: Any, program: Callable[..., Program], number: signal.Signals, record_fault: Callable[..., None]
) -> None:
    # Given a process that runs one delivery and holds others
    topic.trigger_many([("a", 1), ("b", 2), ("c", 3)])
    one = program("waiting")
    assert one.says() == "started a"
    # When it gets SIGTERM, and its handler finishes afterwards
    one.process.send_signal(number)
    assert one.process.stdin is not None
    wait_until(lambda: topic.stats().ready >= 2)  # what it had not started is back before the handler has ended
    assert one.process.poll() is None
    one.process.stdin.write("go on\n")
    code, said, err = one.rest()
    # Then it ends well, and only that delivery was handled
    assert (code, said) == (0, "finished a\nover")
    # And its log says no more than that
    assert re.findall(r" idemgate\.worker (\w+\.\w+) ", err) == ["worker.started", "worker.stopping", "worker.stopped"]
    assert len(err.splitlines()) == 3
    stats = topic.stats()
    assert (stats.ready, stats.in_flight, stats["acked"]) == (2, 0, 1)
    record_fault(ENDED, 1, promises="P7 P11", lost=0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param(signal.SIGINT, signal.SIGTERM, marks=pytest.mark.slow),
        *(pytest.param(number, number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_two_signals_within_a_second_are_one(
    topic: Any,
    program: Callable[..., Program],
    first: signal.Signals,
    second: signal.Signals,
    record_fault: Callable[..., None],
) -> None:
    topic.trigger_many([("a", 1), ("b", 2)])
    one = program("waiting")
    assert one.says() == "started a"
    # When a terminal and a supervisor stop it
    one.process.send_signal(first)
    wait_until(lambda: topic.stats().ready >= 1)  # the first is handled
    one.process.send_signal(second)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(0.2)
    assert one.process.stdin is not None
    one.process.stdin.write("go on\n")
    # Then the handler may finish
    code, said, _ = one.rest()
    assert (code, said) == (0, "finished a\nover")
    record_fault(ENDED, 1, promises="P7 P11", lost=0)


@pytest.mark.parametrize("second", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    topic: Any,
    program: Callable[..., Program],
    second: signal.Signals,
    record_fault: Callable[..., None],
) -> None:
    topic.trigger("a")
    one = program("endless", grace="1h")
    assert one.says() == "started a"
    one.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.2)  # within a second of the first it would count as the first
    one.process.send_signal(second)
    code, said, _ = one.rest()
    # Then it does not wait for its grace time of an hour
    assert (code, said) == (0, "cancelled a\nover")
    # And what was cancelled is due at once, and that was no attempt
    peek = topic.peek("a")
    assert (peek.pending.attempts, topic.stats().ready) == (0, 1)
    record_fault(ENDED, 1, promises="P7 P11", lost=0)


@pytest.mark.parametrize(("grace", "signals"), [("100ms", 1), pytest.param("1h", 2, marks=pytest.mark.slow)])
def test_a_handler_that_swallows_its_cancellation_does_not_keep_the_process(
    topic: Any, program: Callable[..., Program], grace: str, signals: int, record_fault: Callable[..., None]
) -> None:
    topic.trigger("a")
    one = program("swallowing", grace=grace)
    assert one.says() == "started a"
    for _ in range(signals):
        one.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(1.5)  # within a second of the first it would count as the first
    code, said, err = one.rest(20)
    # Then its program goes on and ends
    assert (code, said) == (0, "over")
    # And says so, and its delivery is left to its lease
    assert re.findall(r" (worker\.abandoned|worker\.tasks_left) ", err) == ["worker.abandoned", "worker.tasks_left"]
    assert topic.stats().in_flight == 1
    record_fault(ENDED, 1, promises="P7 P11", lost=0)


def test_a_thread_that_an_async_handler_awaits_does_not_keep_gate_run(
    topic: Any, program: Callable[..., Program]
) -> None:
    topic.trigger("a")
    one = program("to_thread", grace="100ms")
    assert one.says() == "started a"
    assert one.says() == "started a"  # of the thread
    one.process.send_signal(signal.SIGTERM)
    # Then `gate.run()` returns; only Python waits for the thread
    assert one.says() == "over"


def test_a_thread_that_does_not_end_does_not_keep_the_process(
    topic: Any, program: Callable[..., Program], record_fault: Callable[..., None]
) -> None:
    topic.trigger("a")
    one = program("stuck", grace="100ms")
    assert one.says() == "started a"
    one.process.send_signal(signal.SIGTERM)
    code, said, _ = one.rest()
    assert (code, said) == (0, "over")
    # Its delivery is left to its lease
    assert topic.stats().in_flight == 1
    record_fault(ENDED, 1, promises="P7 P11", lost=0)
