"""Soak: Celery workers with child processes on Redis with an append-only file, while everything fails at random.

    IDEMGATE_SOAK=10m pytest integrations/celery/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. Workers and their children are killed and stopped, the broker is
killed and started again, connections are cut. Some tasks wait for an `eta` longer than the visibility timeout, and some
of those are revoked.

kombu takes a message from its queue before it writes it to the unacknowledged ones. A crash between the two loses it.
At the end the producer sends again what has left the broker without an outcome, and counts it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from idemgate.testing import audit
from idemgate.testing.proxy import Proxy
from tests.resilience.consumers import (
    DRAIN,
    LEASE,
    MAX_ATTEMPTS,
    SCOPE,
    SECONDS,
    STALLED,
    WIRE,
    ConsumerSoak,
    find_hot_loops,
)
from tests.resilience.judge import Judge
from tests.resilience.plan import Fault, injecting, plan
from tests.resilience.servers import APPEND, Server
from tests.resilience.verdict import find_growth, read_events
from tests.waiting import wait_until

OPTIONS = {"lease": "2s", "max_attempts": MAX_ATTEMPTS, "backoff": [0, 1]}
VISIBILITY = 2
LATER, REVOKED, LONGEST_WAIT = 0.1, 0.2, 3.0 * VISIBILITY
"""The shares of tasks with a countdown, and of revoked ones among them, and the longest countdown."""
CONF = {
    "task_acks_late": True, "task_reject_on_worker_lost": True, "worker_prefetch_multiplier": 2,
    "broker_connection_retry_on_startup": True, "broker_connection_max_retries": None,
    "broker_transport_options": {
        "visibility_timeout": VISIBILITY, "unacked_restore_interval": 1, "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 3,
    },
}  # fmt: skip
LANES = {
    "wire": (1.5, (*WIRE, "black hole")),
    "broker": (10.0, ("close connections", "kill broker")),
    "processes": (6.0, ("kill", "kill child", "kill child", "stop")),
}
WORKERS = [("prefork", True), ("prefork", False), ("prefork", False)]
"""Whether a worker is steady: it may be stopped, and neither it nor its children are killed."""
GROWTH = {"rss": (0.1, 90e6), "descriptors": (0.0, 12), "threads": (0.0, 12)}
"""A child whose tasks fail grows from 56 to 128 MB and stays there. One of tasks without `once` grows to 168 MB."""


class Producer:
    """A producer that repeats a message until the broker has taken it."""

    def __init__(self, broker: Server, seed: int) -> None:
        self._client = redis.Redis.from_url(broker.url)
        self.app = Celery("producer", broker=broker.url, set_as_current=False)
        self.app.conf.broker_connection_timeout = 1
        self._drawn = random.Random(f"{seed} producer")
        self.confirmed: set[str] = set()
        self.revoked: set[str] = set()
        self.sent = Counter[str]()
        self.copies = self.unconfirmed = self.later = 0

    def publish(self, message_id: str) -> None:
        is_copy = message_id in self.confirmed
        wait = self._drawn.uniform(0, LONGEST_WAIT) if self._drawn.random() < LATER else 0
        result = self.send(message_id, countdown=wait)
        self.later += wait > 0
        if wait and not is_copy and self._drawn.random() < REVOKED:
            with suppress(OperationalError, redis.ConnectionError):  # no worker has to get it
                self.app.control.revoke(result.id)
            self.revoked.add(message_id)
        else:
            self.revoked.discard(message_id)
        self.copies += is_copy
        self.confirmed.add(message_id)

    def send(self, message_id: str, **options: Any) -> Any:
        end = monotonic() + STALLED
        while True:
            try:
                self.sent[message_id] += 1
                return self.app.send_task(SCOPE, [message_id], retry=False, **options)
            except (OperationalError, redis.RedisError):
                assert monotonic() < end
                self.unconfirmed += 1
                sleep(0.1)

    def count_waiting(self) -> int:
        return int(self.ask(lambda client: client.llen("celery")))

    def count_unsettled(self) -> int:
        return int(self.ask(lambda client: client.llen("celery") + client.hlen("unacked")))

    def ask(self, question: Callable[[Any], Any]) -> Any:
        return wait_until(lambda: (question(self._client),), STALLED, not_yet=(redis.RedisError,))[0]

    def close(self) -> None:
        self.app.close()
        self._client.close()


class Soak(ConsumerSoak):
    """The workers, the producer, the proxies in front of both servers, and the faults that happen to them."""

    kinds = WORKERS

    def __init__(self, store: str, namespace: str, broker: Server, folder: Path, seed: int) -> None:
        super().__init__(store, namespace, broker, seed)
        self.folder = folder
        self.wire = Proxy(broker.url, remember=False)
        self.broker_faults = {"close connections": lambda _: self.wire.cut_all(), "kill broker": restart}
        self.publisher = Producer(broker, seed)
        self.resent = 0
        self.children: dict[int, set[int]] = {}
        self.samples: dict[int, list[dict[str, float]]] = defaultdict(list)
        self.lock = threading.RLock()
        """Held by a fault of processes, and while workers that ended are started again."""

    def start_process(self, kind: str, seed: str) -> subprocess.Popen[str]:
        order = {
            "store": self.redis.url, "reports": self.store, "namespace": self.namespace, "broker": self.wire.url,
            "options": OPTIONS, "conf": CONF, "client": kind, "seed": seed,
        }  # fmt: skip
        command = [sys.executable, "-m", "celery", "-A", "soak_app", "worker", "-c", "2", "--without-gossip",
                   "--without-mingle", "-l", "WARNING", "-n", f"w{self.started}@soak"]  # fmt: skip
        environment = os.environ | {
            "SOAK": json.dumps(order), "C_FORCE_ROOT": "1", "PYTHONPATH": str(Path(__file__).parents[3])
        }  # fmt: skip
        with (self.folder / f"log{self.started}").open("wb") as log:
            return subprocess.Popen(
                command, text=True, cwd=Path(__file__).parent, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        for body in bodies:
            self.publisher.publish(body)
        return bodies

    def count_waiting(self) -> int:
        return self.publisher.count_waiting()

    def count_unsettled(self) -> int:
        return self.publisher.count_unsettled()

    def list_dead_letters(self) -> Iterable[str]:
        return self.find_dead().elements()

    def run(self, seconds: float) -> None:
        faults = plan(self.seed, seconds, LANES)
        print(f"\nseed {self.seed}: {sum(map(len, faults.values()))} faults within {seconds:g} s")
        for kind, steady in self.kinds:
            self._start(kind, steady)
        begin, watching = monotonic(), threading.Thread(target=self._watch)
        watching.start()
        try:
            with injecting(faults, self._inject, self.over) as errors:
                self._send_until(lambda: monotonic() > begin + seconds or bool(errors))
        finally:
            self.over.set()
            watching.join()
        self._drain()

    def _watch(self) -> None:
        """Start workers again that ended. Note the memory, descriptors and threads of a child of the steady one."""
        while not self.over.wait(1):
            self.revive()
            for process, (_, steady) in list(self.consumers.items()):
                children = list_children(process.pid)
                self.children.setdefault(process.pid, set()).update(children)
                for child in children[:1] if steady else ():
                    with suppress(OSError):
                        self.samples[child].append(measure(child))

    def revive(self) -> None:
        """Start workers again that ended by themselves: some lost connections are more than Celery survives."""
        with self.lock:
            for process in [process for process in self.consumers if process.poll() is not None]:
                self.counted["a worker ended"] += 1
                self._end(process)
                self._start(*self.consumers.pop(process))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        with self.lock if fault.name in LANES["processes"][1] else nullcontext():
            super()._inject(fault)

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Kill a worker with its children."""
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)  # it makes no more children
            self.children.setdefault(process.pid, set()).update(list_children(process.pid))
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in (process.pid, *self.children.get(process.pid, ())):
            self.raw.rpush(self.name, json.dumps(["killed", pid]))

    def _kill_child(self, amount: float) -> None:
        mortal = [process for process, (_, steady) in self.consumers.items() if not steady]
        if children := list_children(mortal[int(amount * len(mortal))].pid):
            os.kill(children[0], signal.SIGKILL)
            self.raw.rpush(self.name, json.dumps(["killed", children[0]]))

    def _stop(self, amount: float) -> None:
        process = list(self.consumers)[int(amount * len(self.consumers))]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)
            self.over.wait(LEASE * (0.2 + 1.5 * (amount * 10 % 1)))
            os.killpg(process.pid, signal.SIGCONT)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Heal the wires, wait until all tasks are settled, and stop the workers. Resend what the broker lost."""
        self.redis.heal()
        self.redis.release()
        self.redis.cut_all()
        wanted = self.publisher.confirmed - self.publisher.revoked
        unsettled, end, stalled = wanted, monotonic() + DRAIN, monotonic() + STALLED
        while True:
            waiting = self.publisher.count_unsettled()
            dead = self.find_dead()
            left = {one for one in wanted if one not in dead and self.inspect(one).state != "done"}
            if left:  # a task whose completion was not stored has succeeded
                left -= {facts[0] for kind, *facts in self.events() if kind == "ended" and facts[-1] == "not stored"}
            if not waiting and not left:
                break
            if left != unsettled:
                unsettled, stalled = left, monotonic() + STALLED
            elif not waiting:
                for message_id in left:
                    self.publisher.send(message_id)
                self.resent += len(left)
            sample = [(one, self.inspect(one)) for one in sorted(left)[:3]]
            assert monotonic() < min(end, stalled), f"{len(left)} tasks not settled, {waiting} messages left: {sample}"
            self.revive()
            sleep(0.5)
        for process in self.consumers:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0

    def inspect(self, message_id: str) -> Any:
        return self.gate.inspect(message_id, scope=SCOPE)

    def events(self) -> Iterator[list[Any]]:
        return read_events(self.raw, self.name)

    def find_dead(self) -> Counter[str]:
        return Counter(facts[0] for kind, *facts in self.events() if kind == "dead")

    def judged(self) -> Judge:
        return Judge(each for each in self.events() if each[0] not in ("waited", "dead"))

    def growth(self) -> list[str]:
        """Return what grew by more than it may in the child that lived longest. Print all figures."""
        samples = max(self.samples.values(), key=len, default=[])
        return find_growth(f"a child in {len(samples)} s", samples, GROWTH) if len(samples) >= 60 else []

    def close(self) -> None:
        super().close()
        self.publisher.close()
        self.wire.close()


def restart(broker: Server) -> None:
    broker.kill()
    sleep(0.5)
    broker.start()


def list_children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def measure(pid: int) -> dict[str, float]:
    folder = Path(f"/proc/{pid}")
    return {
        "rss": int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


@pytest.fixture
def soak(store: str, namespace: str, tmp_path: Path, seed: int) -> Iterator[Soak]:
    with Server(tmp_path / "broker", *APPEND, "always") as broker:
        made = Soak(store, namespace, broker, tmp_path, seed)
        yield made
        made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_task_is_lost_and_each_second_effect_has_a_documented_reason(soak: Soak, seed: int) -> None:
    # When workers, their children, the broker and connections fail at random under a steady load
    soak.run(SECONDS)
    # Then each task had its effect, or failed for the last time
    # And no effect follows the recorded completion, and each effect before it has a documented reason
    sent, dead, judge = soak.publisher, soak.find_dead(), soak.judged()
    records = {message_id: soak.inspect(message_id) for message_id in sorted(sent.confirmed)}
    assert set(judge.effects) <= sent.confirmed, seed
    dropped = {one for one in sent.revoked if not judge.effects.get(one) and records[one].state != "done"}
    for message_id in records.keys() - dropped:
        judge.judge(message_id, records[message_id], message_id in dead)
    assert judge.wrong == [], (seed, judge.wrong[:5])
    # And the failed tasks used up their attempts
    early = [(one, records[one]) for one in dead if records[one].attempts < MAX_ATTEMPTS]
    assert early == [], (seed, early[:5])
    poison = {one for one in sent.confirmed - sent.revoked if one.startswith("poison")}
    assert poison <= set(dead), (seed, sorted(poison - set(dead))[:5])
    # And deliveries that find their key in progress are bounded
    waits = Counter(key for kind, key, *_ in soak.events() if kind == "waited")
    hot = find_hot_loops(soak.events(), sent.sent)
    assert hot == [], (seed, hot[:5])
    # And the broker lost no more than the crashes explain
    crashes = sum(soak.counted[name] for name in ("kill", "a worker ended", "kill broker", "close connections"))
    assert soak.resent <= 8 * crashes, (seed, soak.resent, crashes)
    # And the store is sound
    report = audit(soak.gate)
    assert report.sound, (seed, str(report))
    print(
        f"{dict(soak.counted)}; {sent.sent.total()} messages of {len(sent.confirmed)} keys, {sent.copies} copies, "
        f"{sent.later} with a countdown, {sent.unconfirmed} sends failed, {soak.resent} sent again because the broker "
        f"lost them; {len(dropped)} of {len(sent.revoked)} revoked ones did not run; "
        f"{sum(record.state == 'done' for record in records.values())} done, {judge.unstored} succeeded without a "
        f"stored completion, {sum(map(len, judge.effects.values()))} effects, second ones explained "
        f"{dict(+judge.reasons)}, {judge.late} of them late; failed {len(poison)} poison, {len(set(dead) - poison)} "
        f"others; in progress elsewhere {waits.total()}, at most {max(waits.values(), default=0)} a key; "
        f"lost 0, unexplained 0"
    )
    # And the children of the steady worker did not grow
    grown = soak.growth() if SECONDS >= 120 else []
    assert grown == [], (seed, grown)
