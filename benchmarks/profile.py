"""Where the server's instructions go, counted by valgrind's callgrind: of a call or a message, by the role of the code
on redis-server, and all of them on every server that is here; and how many of its accesses to memory miss the last
cache, with few and with many messages pending."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from benchmarks.backlog import Backlog, Bare
from benchmarks.callgrind import Rooms, counted, totals
from benchmarks.measuring import Row
from benchmarks.peers.speak import RESULT, payload
from benchmarks.plan import Plan
from benchmarks.server import port_of, programs, started
from idemgate import Gate, Topic
from idemgate.topics.deliveries import Settlement
from idemgate.topics.triggers import MAX_TRIGGERS
from idemgate.worker.consumer import MAX_SETTLED

__all__ = ["run"]

N = 3_200
"""Calls or messages of each work, even in full batches of every kind."""
KEYS = 1_000
"""Of those that merge."""
CACHES = ("--cache-sim=yes", "--I1=32768,8,64", "--D1=1048576,8,64", "--LL=33554432,16,64")
"""As an EPYC has: for data 1 MiB of a core and 32 MiB of some cores together (bytes, ways, line). Left out are the 32
KiB in front: what misses them does not grow with the backlog."""
SIZES = (10_000, 300_000)
WORKS = ("trigger, 100 a call", "take and ack, 100 a call")
Work = Callable[[], object]
Counted = Callable[[Work], Path]
"""Does it once to warm up, then once to count; answers what callgrind wrote."""


def run(plan: Plan) -> list[Row]:
    """The rows, one figure each, since what is counted hardly varies; none where valgrind is missing. `who` is the
    server, or the number of pending messages."""
    if missing := [name for name in ("valgrind", "nm") if shutil.which(name) is None]:
        print(f"left out, without {' and '.join(missing)} on PATH: apt-get install valgrind binutils")
        return []
    first, *others = programs().items()
    rows = [*_instructions(*first, _rooms(first[1]))]
    for name, program in others:
        rows += _instructions(name, program, None)
    return [*rows, *_misses(plan)]


def _rooms(program: str) -> Rooms | None:
    try:
        return Rooms(program)
    except KeyError as name:
        print(f"no roles: redis-server exports no {name}, which Debian's of version 7.0 does")
        return None


def _instructions(server_name: str, program: str, rooms: Rooms | None) -> Iterator[Row]:
    with under_callgrind(program=program) as (server, counting), _gate(server) as gate:
        for works in (_guard(gate), _by_hand(server), _sent(gate), _taken(gate), _bare(server)):
            for name, work in works:
                file = counting(work)
                found = counted(file, rooms) if rooms else {"all": totals(file)["Ir"]}
                yield {"who": server_name, "step": name, **{role: [ir / N] for role, ir in found.items()}}
                print(".", end="", flush=True)


def _gate(server: Any) -> Gate:
    return Gate(f"redis://127.0.0.1:{port_of(server)}/0", namespace="bench", timeout="60s")  # it is slow


def _misses(plan: Plan) -> Iterator[Row]:
    """With so many pending, which a server without callgrind loaded: under callgrind that would take an hour."""
    for size in (plan.size(size) for size in SIZES):
        with tempfile.TemporaryDirectory() as home:
            with started("--dir", home) as raw, closing(Backlog(raw)) as ours:
                kinds = {"": ours, "bare: ": Bare(raw)}
                for kind in kinds.values():
                    kind.fill(size)
                raw.save()
            with under_callgrind("--dir", home, caches=CACHES) as (server, counting), closing(ours):
                for kind in kinds.values():
                    kind.at(server)
                for (before, kind), name in product(kinds.items(), WORKS):
                    yield {"who": str(size), "step": before + name, **_missed(counting(partial(_again, kind, name)))}
                    print(".", end="", flush=True)
    print()


def _again(kind: Backlog | Bare, name: str) -> None:
    kind.works(N)[name]()


def _missed(file: Path) -> Row:
    found = totals(file)
    data, last = (sum(found[event] for event in events) for events in (("D1mr", "D1mw"), ("ILmr", "DLmr", "DLmw")))
    return {"all": [found["Ir"] / N], "data_misses": [data / N], "last_misses": [last / N]}


@contextmanager
def under_callgrind(
    *options: str, caches: tuple[str, ...] = (), program: str | None = None
) -> Iterator[tuple[Any, Counted]]:
    """A server that counts. `program` may be a script that starts one."""
    with tempfile.TemporaryDirectory() as home:
        files = [f"--callgrind-out-file={home}/out", f"--vgdb-prefix={home}/vgdb", f"--log-file={home}/log"]
        words = ["valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no", *files, *caches]
        with started("--hz", "1", *options, under=words, program=program) as server:
            pid, dumps = server.info("server")["process_id"], count(1)

            def tell(*words: str) -> None:
                vgdb = ["vgdb", f"--pid={pid}", f"--vgdb-prefix={home}/vgdb", *words]
                subprocess.run(vgdb, capture_output=True, check=True)

            def counting(work: Work) -> Path:
                work()
                tell("zero")
                work()
                tell("dump")
                return Path(f"{home}/out.{next(dumps)}")

            tell("instrumentation", "on")
            yield server, counting


def _guard(gate: Gate) -> Iterator[tuple[str, Work]]:
    number = count()
    guarded = gate.once(key="{key}", scope="s")(lambda key: RESULT)
    yield "guard, first call: claim and complete", lambda: [guarded(next(number)) for _ in range(N)]
    yield "guard, replay", lambda: [guarded(one) for one in range(N)]
    hundreds = range(N // 100)
    new = lambda: [next(number) for _ in range(100)]  # noqa: E731 - used in three lambdas
    yield "`first`, a new key", lambda: [gate.first(next(number), "24h") for _ in range(N)]
    yield "`first`, a known key", lambda: [gate.first(N * 2, "24h") for _ in range(N)]
    yield "`first_many` of 100 that are new", lambda: [gate.first_many(new(), "24h") for _ in hundreds]
    yield "`claim_many` of 100 that are new", lambda: [gate.claim_many(new()) for _ in hundreds]


def _by_hand(server: Any) -> Iterator[tuple[str, Work]]:
    number = count()

    def first() -> None:
        for key in islice(number, N):
            server.set(f"by-hand:{key}", "running", nx=True, px=30_000)
            server.set(f"by-hand:{key}", RESULT, px=86_400_000)

    def replay() -> None:
        for key in range(N):
            server.set(f"by-hand:{key}", "running", nx=True, px=30_000)
            server.get(f"by-hand:{key}")

    yield "by hand: `SET NX`, `SET`", first
    yield "by hand: `SET NX`, `GET`", replay


def _sent(gate: Gate) -> Iterator[tuple[str, Work]]:
    plain, merging = gate.topic("sent"), gate.topic("merged", window="10m")
    number = count()

    def batches(topic: Topic, numbers: Callable[[], int]) -> None:
        for _ in range(N // MAX_TRIGGERS):
            topic.trigger_many([(f"key:{one}", payload(one)) for one in (numbers() for _ in range(MAX_TRIGGERS))])

    yield "a trigger, alone", lambda: [plain.trigger(f"one:{next(number)}", payload(1)) for _ in range(N)]
    yield f"a trigger of {MAX_TRIGGERS} that are new", lambda: batches(plain, lambda: next(number))
    yield f"a trigger of {MAX_TRIGGERS} that merge", lambda: batches(merging, lambda: next(number) % KEYS)


def _taken(gate: Gate) -> Iterator[tuple[str, Work]]:
    topic = gate.topic("taken", lease="1h")
    topic.trigger_many([(f"key:{one}", payload(one)) for one in range(6 * N + 3 * MAX_SETTLED)])
    calls, held = topic.open(), [topic.take(MAX_SETTLED) for _ in range(3)]  # two of them with handlers

    def turns() -> None:
        for _ in range(N // MAX_SETTLED):
            endings = [Settlement("ack", one) for one in held.pop(0)]
            held.append(gate.context.link.run(calls.settle_and_take(0, endings, MAX_SETTLED)).taken.deliveries)

    def ended() -> None:
        for _ in range(N // 100):
            topic.ack(topic.take(100))

    yield f"a message settled and one taken, {MAX_SETTLED} in turns", turns
    yield "a message taken and acknowledged, of 100", ended
    for some in held:
        topic.ack(some)
    yield "the same, with nothing else in flight", ended


def _bare(server: Any) -> Iterator[tuple[str, Work]]:
    number = count()

    def put() -> None:
        for _ in range(N // MAX_TRIGGERS):
            some = {f"key:{one}": "x" * 80 for one, _ in zip(number, range(MAX_TRIGGERS), strict=False)}
            with server.pipeline(transaction=False) as pipeline:
                pipeline.zadd("due", dict.fromkeys(some, 1), nx=True).hset("what", mapping=some).execute()

    def take() -> None:
        for _ in range(N // 100):
            keys = server.zrange("due", 0, 99)
            server.hmget("what", keys)
            with server.pipeline(transaction=False) as pipeline:
                pipeline.zrem("due", *keys).hdel("what", *keys).execute()

    yield f"bare `ZADD NX`, `HSET` of {MAX_TRIGGERS}", put
    yield "bare `ZRANGE`, `HMGET`, `ZREM`, `HDEL` of 100", take
