"""A steady load, in processes that anything may happen to: guarded calls, handlers, producers.

All of it goes over `order["through"]`, which fails; a list records what happened, in the store at `order["url"]`,
which does not: its order is one order of all that happened anywhere. `order["steady"]`: a process that nobody kills,
whose memory, descriptors, threads and tasks are told each second.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import redis

from idemgate import AlreadyInProgress, Delivery, Gate, LeaseLost, StoreUnavailable, current
from idemgate.core.calls import Call
from idemgate.topics.topic import Topic
from idemgate.worker.worker import Worker

__all__ = ["KEPT", "LEASE", "LOADS", "TOPICS", "topics_of"]

LEASE = 1.5
KEPT = "20s"
"""Retention of records, and how long event ids are remembered: longer than anything in here is late."""
KEYS_A_SECOND, RECENT = 15, 30
TOPICS: dict[str, dict[str, Any]] = {
    "windows": {"window": "80ms", "slots": 2},
    "quiet": {"quiet": "40ms", "max_delay": "300ms"},
    "groups": {"priority": True, "slots": 2},
    "failing": {"max_attempts": 3},
}
OTHERS = {"topics/settle": 4, "topics/settle_and_take": 10}
"""Where, in the arguments of a script that ends deliveries, it is said of those that are not just done how they end."""
Order = dict[str, Any]


def topics_of(gate: Gate) -> dict[str, Topic]:
    common = {"merge": "append", "lease": LEASE, "backoff": "50ms", "dedup_retention": KEPT, "max_attempts": 1000}
    return {name: gate.topic(name, **common | policy) for name, policy in TOPICS.items()}


class Interrupted(Exception):
    """Raised by a signal handler wherever the main thread is, as a soft time limit of Celery is."""


class Interrupts:
    """The handler of SIGUSR1. It raises `Interrupted` in the main thread, but not inside `defer`: there it waits."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False

    def enable(self) -> None:
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, *_: object) -> None:
        if self._depth:
            self._pending = True
        else:
            raise Interrupted

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1

    def release(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._pending and not self._depth:
                self._pending = False
                raise Interrupted

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer interrupts until the block ends, because it reports."""
        self.hold()
        try:
            yield
        finally:
            self.release()


INTERRUPTS = Interrupts()


class Teller:
    """`say(what, ...)`, at once: this process may die."""

    def __init__(self, order: Order) -> None:
        self.store: Any = redis.Redis.from_url(order["url"])
        self.name, self.pid = order["namespace"], os.getpid()

    def __call__(self, *facts: Any) -> None:
        with INTERRUPTS.defer():
            self.store.rpush(f"{self.name}:events", json.dumps(facts))

    def stopping(self) -> bool:
        with INTERRUPTS.defer():
            return bool(self.store.exists(f"{self.name}:stop"))

    def sample(self, tasks: int) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        facts = {
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "threads": threading.active_count(),
            "tasks": tasks,
        }
        self.store.rpush(f"{self.name}:samples:{self.pid}", json.dumps(facts))


def _listening(say: Teller) -> None:
    """Record each reply about an end or a heartbeat as soon as it was read."""
    answer = Call.answer

    def answered(self: Call[Any], reply: Any) -> Any:
        if self.script.name == "guard/complete" and reply == b"k":
            say("done", _guarded(self))
        if self.script.name in BEATS and reply[0] == b"ok":
            for name, token, until in BEATS[self.script.name](self, reply):
                say("renewed", say.pid, name, token, until)
        if self.script.name in OTHERS and reply[0] == b"ok":
            topic = self.keys[0].decode().split(":")[3]
            for key, token, verb, word in _ended(self, reply):
                say("settled", f"{topic}/{key}", token, verb, word)
        return answer(self, reply)

    Call.answer = answered  # type: ignore[method-assign]


def _guarded(call: Call[Any]) -> str:
    return call.keys[0].decode().rpartition(":")[2].rstrip("}")


def _run_on(call: Call[Any], reply: Any) -> Iterator[tuple[str, None, int]]:
    """The key, and until when its lease goes, us."""
    yield _guarded(call), None, (reply[1] + int(call.args[2])) * 1000


def _extended(call: Call[Any], reply: Any) -> Iterator[tuple[str, int, int]]:
    """Each delivery that is still held, and until when."""
    topic, until = call.keys[0].decode().split(":")[3], (reply[1] + int(call.args[1])) * 1000
    for key, token, word in zip(call.args[2::2], call.args[3::2], reply[2:], strict=True):
        if word != b"lost":
            yield f"{topic}/{_text(key)}", int(token), until


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


BEATS: dict[str, Callable[[Call[Any], Any], Iterator[tuple[str, int | None, int]]]] = {
    "guard/renew": _run_on,
    "topics/extend": _extended,
}


def _ended(call: Call[Any], reply: Any) -> Iterator[tuple[str, int, str, str]]:
    """Key, token, verb and outcome of each delivery that a call ended."""
    named, others = msgpack.unpackb(call.args[3]), call.args[OTHERS[call.script.name] :]
    verbs: dict[Any, Any] = dict(zip(others[::4], others[1::4], strict=True))
    words = reply[len(reply) - len(named) // 2 :]
    for place, (key, token, word) in enumerate(zip(named[::2], named[1::2], words, strict=True), 1):
        yield key, token, verbs.get(place, "ack"), word.decode()


def _begun(order: Order) -> tuple[Gate, Teller, random.Random]:
    say = Teller(order)
    _listening(say)
    return Gate(order["through"], namespace=order["namespace"], timeout="4s"), say, random.Random(order["seed"])


@contextmanager
def _run(say: Teller, name: str, group: str, token: int, attempt: int, ids: list[str]) -> Any:
    INTERRUPTS.hold()
    say("start", say.pid, name, group, token, attempt, ids)
    try:
        INTERRUPTS.release()
        yield
    finally:
        with INTERRUPTS.defer():
            say("end", name, token)


# -- guarded calls ----------------------------------------------------------------------------------------------------


class _Closed(Exception):
    """What a guarded function raises now and then: it may be run again."""


def _recent(drawn: random.Random) -> str:
    """One of the keys of these seconds; they are the same in all processes."""
    return f"k{int(time.monotonic() * KEYS_A_SECOND) - drawn.randrange(RECENT)}"


def _lasts(drawn: random.Random) -> float:
    """Seconds of a handler: few outlast a lease, which their heartbeat holds."""
    return drawn.choice([0.0, 0.005, 0.02, 0.1]) if drawn.random() < 0.98 else LEASE * 1.2


def calls(order: Order) -> Callable[[], object]:
    """Calls of a guarded function, of keys that other processes call at the same time."""
    gate, say, drawn = _begun(order)
    options: dict[str, Any] = {"scope": "calls", "lease": LEASE, "retention": KEPT}

    def fails() -> None:
        if drawn.random() < 0.1:
            raise _Closed

    @gate.once(key="{key}", on_in_progress="wait", wait="2s", **options)
    def charge(key: str) -> str:
        with _run(say, key, "", current().token, current().attempt, [key]):
            time.sleep(_lasts(drawn))
            fails()
            return f"receipt for {key}"

    @gate.once(key="{key}", **options)
    async def charge_async(key: str) -> str:
        with _run(say, key, "", current().token, current().attempt, [key]):
            await asyncio.sleep(_lasts(drawn))
            fails()
            return f"receipt for {key}"

    def judge(key: str, answer: object) -> None:
        if answer != f"receipt for {key}":
            say("wrong", f"{key} was answered {answer!r}")

    def block() -> None:
        while not say.stopping():
            key = _recent(drawn)
            try:
                judge(key, charge(key))
            except (AlreadyInProgress, LeaseLost, StoreUnavailable, _Closed, Interrupted):
                pass
            except BaseException as error:
                say("wrong", f"a call raised {error!r}")
            time.sleep(drawn.uniform(0, 0.05))
            check_renewals()

    def check_renewals() -> None:
        """An interrupted call must leave no renewal, which would lock its key."""
        left = [one for one in gate.context.heartbeat.living() if not one.optional]
        if left and order["flavour"] == "interrupted":
            say("wrong", f"an interrupted call left {len(left)} renewals")

    async def wait() -> None:
        while not await asyncio.to_thread(say.stopping):
            key = _recent(drawn)
            try:
                judge(key, await charge_async(key))
            except (AlreadyInProgress, LeaseLost, StoreUnavailable, _Closed):
                pass
            except BaseException as error:
                say("wrong", f"a call raised {error!r}")
            await asyncio.sleep(drawn.uniform(0, 0.05))

    async def waiting() -> None:
        await asyncio.gather(*(wait() for _ in range(4)))

    if order["flavour"] == "interrupted":
        return lambda: _interrupted(say, order, block)
    if order["flavour"] == "sync":
        return lambda: _threads(say, order, [block] * 3)
    return lambda: _loop(say, order, waiting)


# -- handlers ---------------------------------------------------------------------------------------------------------


def handlers(order: Order) -> Callable[[], object]:
    """A worker for all topics. Handlers fail now and then; those of `failing` always."""
    gate, say, drawn = _begun(order)

    def noted(delivery: Delivery[Any]) -> Any:
        name = f"{delivery.topic}/{delivery.key}"
        return _run(say, name, delivery.group, delivery.token, delivery.attempt, delivery.payload)

    def handle(delivery: Delivery[Any]) -> None:
        with noted(delivery):
            time.sleep(_lasts(drawn))
            if delivery.topic == "failing" or drawn.random() < 0.05:
                raise _Closed

    async def handle_async(delivery: Delivery[Any]) -> None:
        with noted(delivery):
            await asyncio.sleep(_lasts(drawn))
            if delivery.topic == "failing" or drawn.random() < 0.05:
                raise _Closed

    for topic in topics_of(gate).values():
        topic.handler(handle if order["flavour"] == "sync" else handle_async)

    async def working() -> None:
        """A worker that finds nobody as it begins says so; as it works, it waits."""
        while True:
            with suppress(StoreUnavailable):
                async with Worker(gate, concurrency=8):
                    await asyncio.Event().wait()

    return lambda: _loop(say, order, working)


# -- producers --------------------------------------------------------------------------------------------------------


def producers(order: Order) -> Callable[[], object]:
    """Triggers, each of an id of its own, sent again until its fate is known; some are cancelled or moved. Dead letters
    are read, and sent back or deleted."""
    gate, say, drawn = _begun(order)
    topics = topics_of(gate)

    def known(ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return ask()
            except StoreUnavailable:
                time.sleep(0.05)

    def produce(thread: int) -> None:
        for number in range(1 << 30):
            if say.stopping():
                return
            name, one = drawn.choice(["windows", "windows", "quiet", "groups", "failing"]), ""
            one = f"{say.pid}.{thread}.{number}"
            own = drawn.random() < 0.2
            key = one if own or name in ("groups", "failing") else f"shared{drawn.randrange(12)}"
            group = f"g{drawn.randrange(6)}" if name == "groups" else None
            trigger(name, key, one, group)
            if own and drawn.random() < 0.5:
                verb = drawn.choice(["cancel", "reschedule"])
                more = {"delay": 0.1} if verb == "reschedule" else {}
                say(verb, one, "asked")
                say(verb, one, known(lambda: getattr(topics[name], verb)(key, group=group, **more)))  # noqa: B023
            if drawn.random() < 0.05:
                bury()
            time.sleep(drawn.uniform(0.005, 0.05))

    def trigger(name: str, key: str, one: str, group: str | None) -> None:
        delay = drawn.uniform(0.001, 0.3) if drawn.random() < 0.2 else None
        priority = drawn.randrange(5) if name == "groups" else None
        say("sent", name, one)
        receipt = known(
            lambda: topics[name].trigger(key, one, group=group, delay=delay, priority=priority, event_id=one)
        )
        if not receipt.accepted and receipt.status != "duplicate":
            say("wrong", f"{one} was answered {receipt.status}")
        say("accepted", name, one)

    def bury() -> None:
        dead = topics["failing"].dead
        letters = known(lambda: dead.list(20))
        say("dead", [one for letter in letters for one in letter.payload])
        ids = [letter.id for letter in letters]
        if drawn.random() < 0.2:
            known(lambda: dead.redrive(ids[:5]))
        else:
            known(lambda: dead.delete(ids))

    def safely(thread: int) -> None:
        try:
            produce(thread)
        except BaseException as error:
            say("wrong", f"a producer raised {error!r}")

    return lambda: _threads(say, order, [lambda n=n: safely(n) for n in range(4)])  # type: ignore[misc]


# -- both kinds of processes ------------------------------------------------------------------------------------------


def _threads(say: Teller, order: Order, works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for one in threads:
        one.start()
    _for_ever(say, order)


def _interrupted(say: Teller, order: Order, work: Callable[[], None]) -> None:
    """Work in the main thread, where interrupts are raised, and go on after each."""
    INTERRUPTS.enable()
    while True:
        with suppress(Interrupted):
            work()
            _for_ever(say, order)


def _for_ever(say: Teller, order: Order) -> None:
    """No process ends before it is killed, so the test knows which it killed."""
    while True:
        time.sleep(1)
        if order["steady"]:
            say.sample(0)


def _loop(say: Teller, order: Order, work: Callable[[], Any]) -> None:
    async def both() -> None:
        working = asyncio.create_task(work())
        while True:
            await asyncio.sleep(1)
            if order["steady"]:
                await asyncio.to_thread(say.sample, len(asyncio.all_tasks()))
            if working.done() and working.exception() is not None:
                say("wrong", f"a loop ended: {working.exception()!r}")
                return

    asyncio.run(both())


LOADS = {"calls": calls, "handlers": handlers, "producers": producers}
