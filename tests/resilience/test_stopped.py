"""An owner that is alive and silent: stopped with SIGSTOP beyond its lease, its heartbeat starved, or forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def program(text: str, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", text, *words],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Return the next line that a program prints after it read this one."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


def claimed(gate: Gate, key: str) -> Any:
    """The claim of a key whose owner has ended or lost its lease."""

    def take() -> Any:
        claim = gate.claim(key, scope="s")
        return claim if claim.started else None

    return wait_until(take)


ZOMBIE = """if True:
    import sys
    from idemgate import Gate, current
    gate = Gate(sys.argv[1], namespace=sys.argv[2])

    @gate.once(key="{k}", scope="s", lease="300ms")
    def work(k):
        print("running", flush=True)
        sys.stdin.readline()
        return f"zombie's, which knew {current().lease_lost}"

    for line in sys.stdin:
        work(line.strip())
        print(gate.counters["once.lost"], gate.counters["once.completed"], flush=True)
"""


@pytest.mark.timeout(0)
def test_an_owner_that_was_stopped_beyond_its_lease_writes_nothing(
    url: str, namespace: str, many: Any, record_fault: Any
) -> None:
    n = min(many(2), 300)
    with Gate(url, namespace=namespace) as gate, program(ZOMBIE, url, namespace) as zombie:
        for number in range(n):
            # Given an owner that is stopped in the middle of its work
            assert ask(zombie, f"k{number}") == "running\n"
            zombie.send_signal(signal.SIGSTOP)
            # When its lease has lapsed, and another owner did the work
            taken = claimed(gate, f"k{number}")
            assert taken.taken_over == 1
            assert taken.complete("ours")
            # And it goes on
            zombie.send_signal(signal.SIGCONT)
            # Then it raises LeaseLost, and has written nothing
            assert ask(zombie, "go on") == f"{number + 1} 0\n"
            assert gate.claim(f"k{number}", scope="s").result == "ours"
    record_fault("SIGSTOP beyond the lease, then SIGCONT", n, promises="P3 P5 P15", stale_writes=0, told=n)


STARVED = """if True:
    import sys, time
    from idemgate import Gate, current
    gate = Gate(sys.argv[1], namespace=sys.argv[2])

    @gate.once(key="{k}", scope="s", lease="300ms")
    def work(k):
        print("running", flush=True)
        sum(range(100_000_000))  # one call that holds the GIL for seconds
        end = time.monotonic() + 30
        while not current().lease_lost and time.monotonic() < end:
            time.sleep(0.001)
        print(current().lease_lost, gate.counters["once.lease_lost"], flush=True)

    for number, line in enumerate(sys.stdin):
        work(line.strip())
        print(gate.counters["once.completed"], flush=True)
"""


@pytest.mark.timeout(0)
def test_a_heartbeat_that_was_starved_says_so_before_anything_is_completed(
    url: str, namespace: str, many: Any, record_fault: Any
) -> None:
    n = min(many(1), 50)
    with Gate(url, namespace=namespace) as gate, program(STARVED, url, namespace) as starved:
        assert starved.stdout is not None
        for number in range(n):
            # Given a run whose C code holds the GIL for longer than its lease
            assert ask(starved, f"k{number}") == "running\n"
            # When another owner took over
            taken = claimed(gate, f"k{number}")
            # Then its heartbeat says so while it still runs, and nothing is completed
            assert starved.stdout.readline() == f"True {number + 1}\n"
            assert starved.stdout.readline() == "0\n"
            assert taken.complete("ours")
    record_fault("heartbeat starved by code that holds the GIL", n, promises="P3 P5 P15", stale_writes=0, told=n)


@pytest.mark.timeout(0)
def test_of_64_threads_one_runs(url: str, namespace: str, many: Any, record_fault: Any) -> None:
    rounds, runs = many(5), Counter[int]()
    with Gate(url, namespace=namespace) as gate:
        barrier = threading.Barrier(64)

        @gate.once(key="{k}", scope="s", on_in_progress="wait")
        def work(k: int) -> int:
            runs[k] += 1
            return k

        answers: list[Any] = []

        def contest() -> None:
            for number in range(rounds):
                barrier.wait(60)
                answers.append(work(number) == number)

        threads = [threading.Thread(target=contest) for _ in range(64)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert runs == dict.fromkeys(range(rounds), 1)
    assert answers == [True] * 64 * rounds
    record_fault("64 threads call the same key at once", rounds, promises="P1 P2", winners=rounds, wrong_answers=0)


EXITS = """if True:
    import asyncio, sys, threading, time
    from idemgate import Gate
    gate, how = Gate(sys.argv[1], namespace=sys.argv[2]), sys.argv[3]

    @gate.once(key="{k}", scope="s", lease="200ms")
    def work(k):
        started.set()
        time.sleep(60)

    @gate.once(key="{k}", scope="s", lease="200ms")
    async def awork(k):
        started.set()
        await asyncio.sleep(60)

    started = threading.Event()
    if how == "thread":
        threading.Thread(target=work, args=("k",), daemon=True).start()
        started.wait()
    else:
        async def main():
            task = asyncio.create_task(awork("k"))
            while not started.is_set():
                await asyncio.sleep(0)
            if how == "raise":
                raise SystemExit(0)
        asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["thread", "task", "raise"])
def test_an_interpreter_that_ends_with_work_in_flight_ends_and_leaves_a_key_that_can_be_taken(
    how: str, url: str, namespace: str, many: Any, record_fault: Any
) -> None:
    n = min(many(1), 10)
    for turn in range(n):
        # Given a program that ends while its work runs
        ended = program(EXITS, url, f"{namespace}-{turn}", how)
        _, errors = ended.communicate(timeout=60)
        # Then it ends, without a word
        assert (ended.returncode, errors) == (0, "")
        # And the key is free: released, or when its lease ends
        with Gate(url, namespace=f"{namespace}-{turn}") as gate:
            claim = claimed(gate, "k")
            assert claim.taken_over == (how == "thread")
    record_fault("interpreter exit with work in flight", n, promises="P3")


FORKS = """if True:
    import os, sys, threading
    from idemgate import Gate
    gate = Gate(sys.argv[1], namespace=sys.argv[2])
    mine = gate.context.link.command("CLIENT", "ID")
    # A thread that is in the middle of everything that is locked for a moment
    locks = [gate.counters._lock, gate.context._lock, gate.context.link._lock, gate.context.link._pool._available]
    held, go = threading.Event(), threading.Event()
    def hold():
        for lock in locks: lock.acquire()
        held.set(); go.wait()
        for lock in reversed(locks): lock.release()
    thread = threading.Thread(target=hold); thread.start(); held.wait()
    child = os.fork()
    if child == 0:
        import signal; signal.alarm(20)
        fresh = gate.once(key="{k}", scope="s")(lambda k: k)
        assert fresh("child") == "child"
        assert gate.context.link.command("CLIENT", "ID") != mine  # the parent's connection is the parent's
        os._exit(0)
    go.set(); thread.join()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert gate.once(key="{k}", scope="s")(lambda k: k)("parent") == "parent"
    assert gate.context.link.command("CLIENT", "ID") == mine
    print(status)
"""


def test_a_child_forked_while_a_thread_held_every_lock_goes_on(
    url: str, namespace: str, many: Any, sound: Any, record_fault: Any
) -> None:
    n = min(many(1), 30)
    for turn in range(n):
        ended = program(FORKS, url, f"{namespace}-{turn}")
        out, errors = ended.communicate(timeout=60)
        assert (out, ended.returncode) == ("0\n", 0), errors
        with Gate(url, namespace=f"{namespace}-{turn}") as gate:
            sound(gate)
    record_fault("fork while another thread holds every lock of a gate", n, promises="P15")
