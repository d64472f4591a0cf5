"""Soak: a steady load while everything fails at random, and afterwards nothing is lost, done twice, or left behind.

    IDEMGATE_SOAK=10m pytest tests/resilience/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed; `IDEMGATE_SEED` repeats the plan, but not what
the operating system makes of it. From two minutes on it is also checked that the memory, file descriptors, threads and
tasks of the processes that live through it, and the keys and the memory of the server, do not grow from the first
third of the time to the last.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import redis

from idemgate import Gate, StoreUnavailable
from idemgate.core.durations import milliseconds
from idemgate.testing import audit
from idemgate.testing.proxy import Proxy
from tests.cluster import wait_for
from tests.resilience.load import LEASE, TOPICS, topics_of
from tests.resilience.plan import Fault, injecting, plan
from tests.resilience.servers import Jumpy
from tests.resilience.verdict import Verdict, find_growth, read_events
from tools.reliability import server_of

SECONDS = milliseconds(os.environ.get("IDEMGATE_SOAK", "6s"), "IDEMGATE_SOAK") / 1000
JUMP = 400
"""Ms that the server's clock is off at most, before or behind: so that no jump ends a lease."""
SCRIPT = b"EVALSHA"
WIRE = (
    "cut a reply", "cut a reply within", "reset", "drop a request", "double a request", "swallow a request",
    "hold a request", "release", "cut all", "slow", "black hole", "mute", "mute a connection", "delay a reply",
)  # fmt: skip
LANES = {
    "wire": (0.5, WIRE),
    "processes": (2.0, ("kill", "kill", "stop")),
    "signals": (0.2, ("interrupt",)),
    "layout": (5.0, ("reshard",)),
    "server": (1.5, ("kill clients", "flush scripts", "jump", "stop server", "kill server")),
}
PROCESSES = [
    ("calls", "sync", True), ("calls", "async", True), ("handlers", "async", True), ("handlers", "sync", True),
    ("producers", "sync", True), ("calls", "sync", False), ("calls", "async", False), ("handlers", "sync", False),
    ("handlers", "async", False), ("producers", "sync", False),
    ("calls", "interrupted", False), ("calls", "interrupted", False),
]  # fmt: skip
GROWTH = {
    "rss": (0.1, 4e6), "descriptors": (0.0, 8), "threads": (0.0, 8), "tasks": (0.0, 16),
    "keys": (0.25, 100), "memory": (0.15, 1e6),
}  # fmt: skip
"""By which part of it, and by how much on top, the median of the last third of the time may be above that of the first:
of each process that lives through it, and of the server."""


STALLED, DRAIN = 120, 900
"""Seconds without anything that happens, and in all, after which what is left will not be done."""


class Soak:
    """The server that fails, the proxy before it, the processes of the load, and what happens to them."""

    def __init__(self, server: Jumpy, zygote: Any, url: str, raw: Any, namespace: str, seed: int) -> None:
        self.server, self.zygote, self.raw, self.name = server, zygote, raw, namespace
        self.proxy = Proxy(server.url, remember=False)
        self.order = {"url": url, "through": self.proxy.url, "namespace": namespace}
        self.seeds = (f"{seed} {number}" for number in itertools.count())
        self.living: dict[int, dict[str, Any]] = {}
        self.resharding: dict[str, int] = {}
        self.steady: dict[str, str] = {}
        self.counted: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.over = threading.Event()
        self.serving = threading.Lock()
        self.gate = Gate(server.url, namespace=namespace, timeout="20s")

    def start(self, kind: str, flavour: str, steady: bool) -> None:
        order = {**self.order, "scene": kind, "flavour": flavour, "steady": steady, "seed": next(self.seeds)}
        pid = self.zygote.start(**order)
        self.living[pid] = order
        if steady:
            self.steady[f"{self.name}:samples:{pid}"] = f"{kind}, {flavour}"

    def run(self, faults: dict[str, list[Fault]], seconds: float) -> None:
        for one in PROCESSES:
            self.start(*one)
        begin = monotonic()
        with injecting(faults, self._inject, self.over) as errors:
            while monotonic() < begin + seconds and not errors:
                self._sample()
                self.over.wait(1)

    def _inject(self, fault: Fault) -> None:
        getattr(self, "_" + fault.name.replace(" ", "_"))(fault.amount)
        self.counted[fault.name] += 1

    def _sample(self) -> None:
        with self.serving, suppress(redis.ConnectionError):  # this client may be killed, too: the next sample tells
            found: Any = self.server.client.info("memory")
            keys: Any = self.server.client.dbsize()
            self.samples.append({"memory": found["used_memory"], "keys": keys})

    # -- the wire -----------------------------------------------------------------------------------------------------

    def _cut_a_reply(self, _: float) -> None:
        self.proxy.cut_reply(SCRIPT)

    def _cut_a_reply_within(self, amount: float) -> None:
        self.proxy.cut_reply_at(SCRIPT, int(amount * 60))

    def _reset(self, _: float) -> None:
        self.proxy.reset_reply(SCRIPT)

    def _drop_a_request(self, _: float) -> None:
        self.proxy.drop_request(SCRIPT)

    def _double_a_request(self, _: float) -> None:
        self.proxy.double_request(SCRIPT)

    def _swallow_a_request(self, _: float) -> None:
        self.proxy.swallow_request(SCRIPT)

    def _hold_a_request(self, _: float) -> None:
        self.proxy.hold_request(SCRIPT)

    def _mute_a_connection(self, _: float) -> None:
        self.proxy.mute_connection(SCRIPT)

    def _delay_a_reply(self, amount: float) -> None:
        self.proxy.delay_reply(SCRIPT, 1.5 * LEASE * amount)

    def _release(self, _: float) -> None:
        with self.serving, suppress(OSError):  # all clients may be killed meanwhile
            self.proxy.release()

    def _cut_all(self, _: float) -> None:
        self.proxy.cut_all()

    def _slow(self, amount: float) -> None:
        self.proxy.delay = 0.05 * amount
        self.over.wait(0.5)
        self.proxy.delay = 0.0

    def _black_hole(self, amount: float) -> None:
        self.proxy.black_hole = True
        self.over.wait(2 * LEASE * amount**4)
        self.proxy.black_hole = False
        self.proxy.cut_all()

    def _mute(self, amount: float) -> None:
        self.proxy.mute = True
        self.over.wait(2 * LEASE * amount**4)
        self.proxy.mute = False
        self.proxy.cut_all()

    # -- the processes ------------------------------------------------------------------------------------------------

    def _kill(self, amount: float) -> None:
        mortal = [pid for pid, order in self.living.items() if not order["steady"]]
        pid = mortal[int(amount * len(mortal))]
        order = self.living.pop(pid)
        self.zygote.kill(pid)
        self.raw.rpush(f"{self.name}:events", json.dumps(["killed", pid]))
        self.start(order["scene"], order["flavour"], steady=False)

    def _stop(self, amount: float) -> None:
        pids = list(self.living)
        pid = pids[int(amount * len(pids))]
        os.kill(pid, signal.SIGSTOP)
        self.over.wait(LEASE * (0.2 + 1.5 * (amount * 10 % 1)))
        os.kill(pid, signal.SIGCONT)

    def _interrupt(self, amount: float) -> None:
        """Make a signal handler raise wherever the process is."""
        pids = [pid for pid, order in tuple(self.living.items()) if order["flavour"] == "interrupted"]
        os.kill(pids[int(amount * len(pids))], signal.SIGUSR1)

    # -- the layout ---------------------------------------------------------------------------------------------------

    def _reshard(self, amount: float) -> None:
        """Change the slots of a topic. The processes know former ones until a server corrects them."""
        name = ("windows", "groups")[int(amount * 2)]
        number = self.resharding.setdefault(name, (1, 2, 4)[int(amount * 1000) % 3])  # a change that failed goes on
        with suppress(StoreUnavailable):  # the server is being killed
            topics_of(self.gate)[name].reshard(number)
            del self.resharding[name]

    # -- the server ---------------------------------------------------------------------------------------------------

    def _kill_clients(self, _: float) -> None:
        self.server.client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    def _flush_scripts(self, _: float) -> None:
        self.server.client.script_flush()

    def _jump(self, amount: float) -> None:
        self.server.jump(int(JUMP * (2 * amount - 1)))

    def _stop_server(self, amount: float) -> None:
        assert self.server.process is not None
        with self.serving:
            self.server.process.send_signal(signal.SIGSTOP)
            self.over.wait(0.6 * amount)
            self.server.process.send_signal(signal.SIGCONT)

    def _kill_server(self, amount: float) -> None:
        """Neither policy loses what was acknowledged, as long as the machine lives."""
        with self.serving:
            self.server.kill()
            self.over.wait(0.5 * amount)
            self.server.options = (*BASE, "--appendfsync", "always" if amount < 0.5 else "no")
            self.server.start()

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """No new load; what there is gets done."""
        self.raw.set(f"{self.name}:stop", 1)
        self.proxy.heal()
        self.proxy.release()
        self.proxy.cut_all()
        topics = topics_of(self.gate)
        for name, number in self.resharding.items():
            topics[name].reshard(number)
        for name, topic in topics.items():
            topic.reshard(TOPICS[name].get("slots", 1))

        def empty() -> bool:
            found = [topic.stats() for topic in topics.values()]
            return not any(one.pending + one.in_flight for one in found)

        told, quiet = -1, monotonic()
        end = monotonic() + DRAIN
        while monotonic() < quiet + 2 or not empty():
            # A busy machine is slow, and nothing is lost by that; but something has to happen.
            assert monotonic() < min(end, quiet + STALLED), (self._wrong(), [one.stats() for one in topics.values()])
            if (now := self.raw.llen(f"{self.name}:events")) != told:
                told, quiet = now, monotonic()
            sleep(0.1)
        self.end()

    def _wrong(self) -> list[Any]:
        """What the processes themselves say went wrong, and why nothing may be done any more."""
        return [facts for what, *facts in self.events() if what == "wrong"][:5]

    def end(self) -> None:
        for pid in list(self.living):
            del self.living[pid]
            self.zygote.kill(pid)

    def close(self) -> None:
        self.over.set()
        self.end()
        self.proxy.close()
        self.gate.close()
        for key in self.raw.scan_iter(f"{self.name}:*", count=1000):
            self.raw.delete(key)

    def events(self) -> Iterator[list[Any]]:
        return read_events(self.raw, f"{self.name}:events")

    def grown(self) -> list[str]:
        """What grew by more than it may, of each that lived through it; prints all."""
        told = {name: list(map(json.loads, self.raw.lrange(key, 0, -1))) for key, name in self.steady.items()}
        samples = {**told, "server": self.samples}
        return [line for name, one in samples.items() for line in find_growth(name, one, GROWTH)]


BASE = ("--appendonly", "yes")


@pytest.fixture
def soak(
    tmp_path: Path, clock_library: Path, zygote: Any, url: str, raw: Any, namespace: str, seed: int
) -> Iterator[Soak]:
    with Jumpy(tmp_path / "data", clock_library, *BASE, "--appendfsync", "always") as server:
        made = Soak(server, zygote, url, raw, namespace, seed)
        yield made
        made.close()


@pytest.mark.timeout(0)
def test_nothing_is_lost_done_twice_or_left_behind(soak: Soak, seed: int, record_fault: Callable[..., None]) -> None:
    faults = plan(seed, SECONDS, LANES)
    print(f"\nseed {seed}: {sum(map(len, faults.values()))} faults within {SECONDS:g} s")
    # Given topics, so that nobody meets a store that is away before it knows them
    topics = topics_of(soak.gate)
    for topic in topics.values():
        topic.open()
    # When everything fails at random under a steady load
    soak.run(faults, SECONDS)
    soak.drain()
    # Then nothing was lost, or done twice, or ran beside another but where a lease had ended
    verdict = Verdict(soak.events(), int(LEASE * 1e6), 2_000 * JUMP + 10_000)
    assert verdict.wrong == [], (seed, verdict.wrong[:5])
    assert verdict.lost() == set(), (seed, sorted(verdict.lost())[:5])
    lapsed = acked = 0
    for name, topic in topics.items():
        stats = topic.stats()
        # And every start of a handler is a delivery that was counted
        assert verdict.starts(name) <= stats["taken"] - stats["returned"], (seed, name, stats)
        # And each owner that lost its lease is counted
        assert sum(one.startswith(f"{name}/") for one, _ in verdict.overtaken) <= stats["lapsed"], (seed, name, stats)
        lapsed, acked = lapsed + stats["lapsed"], acked + stats["acked"]
    # And this judged what was done: who dies does not tell of it, but few do
    assert acked / 2 < verdict.counted["ack ok"] <= acked, (seed, acked, verdict.counted)
    # And the store is as it must be
    report = audit(soak.gate)
    assert report.sound, (seed, str(report))
    # And when all has lapsed, no key is left but those of topics
    soak.server.jump(3_600_000)
    most = 1 + 14 * sum(policy.get("slots", 1) for policy in TOPICS.values())
    wait_for(lambda: _keys(soak.server.client) <= most)
    assert not list(soak.server.client.scan_iter(f"*{soak.name}:once:*", count=1000))
    # And nothing grew
    grown = soak.grown() if SECONDS >= 120 else []
    assert grown == [], (seed, grown)
    counted = verdict.counted
    print(f"{dict(soak.counted)}\n{dict(counted)}\n{lapsed} lapsed, {verdict.again} guarded runs again")
    record_fault(
        "everything at random, under a steady load (soak)",
        sum(soak.counted.values()),
        promises="P1 P2 P3 P4 P5 P6 P7 P10 P13 P15",
        seed=seed,
        server=server_of(soak.server.url),
        seconds=SECONDS,
        triggers=len(verdict.accepted),
        deliveries=sum(verdict.starts(name) for name in topics),
        guarded_runs=counted["done"],
        lost=0,
        done_twice=0,
        lived_beyond_their_lease=len(verdict.overtaken),
        grown=len(grown),
    )


def _keys(client: redis.Redis) -> int:
    found: Any = client.dbsize()
    return int(found)
