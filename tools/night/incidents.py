"""The incidents. Each says how it is planted and what must be found. It goes on with what a person then does.

An incident is a generator. It plants, yields what is to be seen, and continues when that was seen. The printed command
of a finding has run by then. What only a person can do follows in the generator.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from idemgate.audit.running import limit_of
from tools.night.live import PRODUCERS, WORKERS, Live, await_true

__all__ = ["CALM", "INCIDENTS", "Answer", "Calm", "Found", "Gone", "Story"]

TOPICS = ("charges", "mails", "totals", "renders")
KEYS = ("order-7", "order 7", "o'brien", "größe 7", "$HOME", "a\\b", "-n", "--all", "x\x1b[31m", "tab\tkey")
"""Keys of which a seed takes one. A shell and a terminal read most of them otherwise."""

DRAINING = ("topic-late", "group-blocked")
"""What is found while messages that waited for long are handled."""


@dataclass
class Found:
    """A finding that `status` and an alert must show within 30 s.

    Attributes:
        kind: the kind of the finding.
        of, key, where: its topic or scope, its key, and its server or process. None: any but "".
        says: texts that its description includes.
        after: the seconds from now until it is a finding.
        also: kinds that may be found besides, because they follow.
        shows: texts that its command prints.
    """

    kind: str
    of: str = ""
    key: str | None = ""
    where: str = ""
    says: tuple[str, ...] = ()
    after: float = 0
    also: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()


@dataclass
class Gone:
    """A finding that must be gone soon. `again`: the printed command may be needed several times."""

    kind: str
    again: bool = False


@dataclass
class Answer:
    """What `key show` must tell of a key: rows of its timeline, and texts that it prints. No finding, and no alert."""

    key: str
    timeline: tuple[dict[str, str], ...]
    says: tuple[str, ...] = ()


@dataclass
class Calm:
    """For so many seconds nothing is found, and no alert fires."""

    seconds: float


Story = Iterator[Found | Gone | Answer | Calm]
INCIDENTS: dict[str, Callable[[Live, Random], Story]] = {}
CALM: dict[str, Callable[[Live, Random], Story]] = {}
_Tell = Callable[[Live, Random], Story]


def incident(tell: _Tell) -> _Tell:
    INCIDENTS[tell.__name__.replace("_", "-")] = tell
    return tell


def calm(tell: _Tell) -> _Tell:
    CALM[tell.__name__.replace("_", "-")] = tell
    return tell


# -- topics -----------------------------------------------------------------------------------------------------------


@incident
def poison_message(live: Live, drawn: Random) -> Story:
    """Other messages fail, too, and succeed later."""
    topic, key = drawn.choice(TOPICS), drawn.choice(KEYS)
    group = drawn.choice(["tenant-3", "-v", "the big one"]) if topic == "renders" else None
    live.change(fails=[topic, key], flaky=drawn.choice([0.01, 0.2, 0.5]))
    with live.gate() as gate:
        gate.topic(topic).trigger(key, 7, group=group)
        await_true(lambda: _attempts(gate.topic(topic).peek(key, group=group)) >= limit_of("poison-message"))
    yield Found("poison-message", topic, key, says=("KeyError: 'address'",), shows=("buried",))
    yield Gone("poison-message")
    live.change(fails=None)
    live.run("dead", "redrive", topic, "--all")


def _attempts(seen: Any) -> int:
    return seen.pending.attempts if seen.pending else 0


@incident
def slow_consumer(live: Live, drawn: Random) -> Story:
    topic = drawn.choice(TOPICS)
    live.change(slow=[topic, None, drawn.uniform(10, 20)])
    says = ("as many as its concurrency of 4 allows",)
    yield Found("topic-late", topic, says=says, after=limit_of("topic-late") + 1, also=DRAINING)
    live.change(slow=None)
    yield Gone("topic-late")


@incident
def forgotten_pause(live: Live, drawn: Random) -> Story:
    topic, after = drawn.choice(TOPICS), 1 if live.quick else drawn.uniform(1, 20)
    with live.gate(seconds_ago=limit_of("topic-paused") - after) as gate:
        gate.topic(topic).pause("the database is down")
    yield Found("topic-paused", topic, says=("the database is down",), after=after, also=DRAINING)
    yield Gone("topic-paused")


@incident
def renamed_handler(live: Live, drawn: Random) -> Story:
    """The producers still use the old name, or they use the new one and old messages are left."""
    topic = drawn.choice(TOPICS)
    renamed = (f"idemgate topic transfer {topic} {topic}-v2",)
    if drawn.random() < 0.5:
        live.restart(WORKERS[0], renamed=topic)
        live.stop(WORKERS[1])
        live.start(WORKERS[1], renamed=topic)
        yield Found("topic-unserved", topic, says=renamed, after=limit_of("topic-unserved"), also=DRAINING)
        live.restart(*WORKERS)
        yield Gone("topic-unserved")
    else:
        with live.gate() as gate:
            gate.topic(topic).trigger("order-7", 1, delay="1h")
        live.restart(*PRODUCERS, *WORKERS, renamed=topic)
        after, shows = limit_of("topic-abandoned"), ("scheduled",)
        yield Found("topic-abandoned", topic, says=renamed, after=after, also=DRAINING, shows=shows)
        live.run("topic", "transfer", topic, f"{topic}-v2")
        yield Gone("topic-abandoned")


@incident
def hanging_handlers_at_the_limit(live: Live, drawn: Random) -> Story:
    topic = drawn.choice(TOPICS)
    live.change(hangs=topic)
    with live.gate() as gate:
        await_true(lambda: gate.topic(topic).stats().in_flight == 4)
    where, after = ("app.py:",), limit_of("handlers-hang") + 1
    yield Found("handlers-hang", topic, None, None, where, after, also=DRAINING, shows=where)
    live.change(hangs=None)
    live.restart(*WORKERS)
    yield Gone("handlers-hang")


@incident
def unmergeable_payload(live: Live, drawn: Random) -> Story:
    key, payload = drawn.choice(KEYS), drawn.choice(["seven", [7], {"n": 7}, None])
    live.change(refused=["totals", key, payload])
    yield Found("payload-refused", "totals", key, None, after=1, shows=("refused",))
    live.change(refused=None)
    live.restart("producer-0")
    yield Gone("payload-refused")


@incident
def fast_producer_clock(live: Live, drawn: Random) -> Story:
    topic, key, unit = drawn.choice(TOPICS), drawn.choice(KEYS), drawn.choice([1, 1_000, 1_000_000])
    group = drawn.choice(["tenant-3", "-v"]) if topic == "renders" else None
    live.change(versioned=[topic, key, group, unit])
    live.start("producer-2", ahead=drawn.uniform(90, 100_000))
    with live.gate() as gate:
        await_true(lambda: gate.topic(topic).stats()["dropped_version"])
    also = ("process-clock", "version-ahead")
    yield Found("version-ahead", topic, key, after=1, also=also)
    yield Found("process-clock", where=None, says=("ahead of",), also=also, shows=("clock ahead",))
    live.stop("producer-2", signal.SIGKILL)
    live.change(versioned=None)
    yield Gone("process-clock")
    yield Gone("version-ahead", again=True)


@incident
def hot_group(live: Live, drawn: Random) -> Story:
    group = drawn.choice(["tenant-3", "the big one", "a'b"])
    live.change(hot=group, slow=["renders", group, drawn.uniform(4, 8)])
    says = (repr(group),)
    yield Found(
        "group-blocked", "renders", says=says, after=limit_of("group-blocked") + 1, also=DRAINING, shows=(group,)
    )
    live.change(hot=None, slow=None)
    live.restart(*WORKERS, *PRODUCERS, revision=4)  # with more at once for each group
    yield Gone("group-blocked")


# -- servers ----------------------------------------------------------------------------------------------------------


@incident
def server_out_of_memory(live: Live, drawn: Random) -> Story:
    used = live.redis.info("memory")["used_memory"]
    live.redis.config_set("maxmemory", round(used / drawn.uniform(0.96, 2)))
    yield Found("memory", where=_server(live), also=("completion-lost", "store-unavailable"))
    yield Gone("memory")


@incident
def evicting_server(live: Live, drawn: Random) -> Story:
    """Another program fills the server, and a cache setting lets it evict."""
    policy = drawn.choice(["allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu"])
    fill = live.redis.pipeline()
    for number in range(2000):
        fill.set(f"page:{number}", "x" * 5000, ex=3600)
    fill.execute()
    live.redis.config_set("maxmemory-policy", policy)
    live.redis.config_set("maxmemory", live.redis.info("memory")["used_memory"] - 1_000_000)
    await_true(lambda: live.redis.info("stats")["evicted_keys"])
    also = ("eviction", "evicted", "memory")
    yield Found("eviction", where=_server(live), says=(policy,), also=also)
    yield Gone("eviction")
    live.redis.config_set("maxmemory", 0)
    yield Found("evicted", where=_server(live), also=also, shows=("looked at",))
    live.redis.config_resetstat()  # after the audit, as the page says
    yield Gone("evicted")


def _server(live: Live) -> str:
    return f"127.0.0.1:{live.port}"


# -- guarded keys -----------------------------------------------------------------------------------------------------


@incident
def held_key(live: Live, drawn: Random) -> Story:
    key = drawn.choice(KEYS)
    _kill_owner(live, key)
    live.change(calls=["settle", key])
    yield Found("key-held", "settle", key, after=1, shows=("held",))
    live.change(calls=None)
    live.run("key", "resolve", "--scope", "settle", drawn.choice(["--done", "--again"]), "--", key)
    yield Gone("key-held")


@incident
def hanging_call(live: Live, drawn: Random) -> Story:
    key = drawn.choice(KEYS)
    live.change(stuck=["audit", key], calls=["audit", key])
    with live.gate() as gate:
        await_true(lambda: gate.inspect(key, scope="audit").state == "in_progress")
    live.change(calls=None)
    says = ("its max_run of 5 s", "app.py:")
    yield Found("calls-hang", "audit", key, None, says, after=5, shows=("app.py:",))
    live.change(stuck=None)
    live.restart(*PRODUCERS)
    yield Gone("calls-hang")


@incident
def key_completed_by_hand(live: Live, drawn: Random) -> Story:
    key = drawn.choice(KEYS)
    _kill_owner(live, key)
    live.run("key", "resolve", "--scope", "settle", "--done", "--why", "the bank says so", "--", key)
    by_hand = {"of": "", "what": "key resolve", "why": "the bank says so"}
    yield Answer(key, ({"of": "settle", "what": "resolved_done"}, by_hand), says=("done",))


def _kill_owner(live: Live, key: str) -> None:
    """Let a producer be killed while it runs the work of a key. Return when the key waits for a decision."""
    live.change(stops=["settle", key, signal.SIGKILL], calls=["settle", key])
    killed = live.await_end()
    live.change(stops=None, calls=None)
    live.start(killed)
    with live.gate() as gate:
        await_true(lambda: gate.inspect(key, scope="settle").state == "held")


@incident
def duplicate_that_ran_twice(live: Live, drawn: Random) -> Story:
    key = drawn.choice(KEYS)
    live.change(stops=["charge", key, signal.SIGSTOP], calls=["charge", key])
    stopped = live.await_stop()
    live.change(stops=None)
    [other] = {*PRODUCERS} - {stopped}
    with live.gate() as gate:
        await_true(lambda: gate.inspect(key, scope="charge").state == "done")
    live.change(calls=None)
    live.signal(stopped, signal.SIGCONT)
    first, second = (f"pid {live.pid(one)} on" for one in (stopped, other))
    says = ("done", "ran twice")
    yield Answer(key, ({"what": "taken_over", "by": second}, {"what": "lost", "by": first}), says=says)


@incident
def cancelled_message(live: Live, drawn: Random) -> Story:
    """A command cancels it, or a program."""
    topic, key = drawn.choice(TOPICS), drawn.choice(KEYS)
    with live.gate() as gate:
        gate.topic(topic).trigger(key, 1, delay="1h")
        if drawn.random() < 0.5:
            gate.topic(topic).cancel(key)
            timeline: tuple[dict[str, str], ...] = ({"of": topic, "what": "cancelled"},)
        else:
            live.run("topic", "cancel", "--yes", "--why", "the customer called", "--", topic, key)
            by_hand = {"of": "", "what": f"topic cancel {topic}", "why": "the customer called"}
            timeline = ({"of": topic, "what": "cancelled"}, by_hand)
    yield Answer(key, timeline, says=("absent",))


# -- what is no incident ----------------------------------------------------------------------------------------------


@calm
def quiet(live: Live, drawn: Random) -> Story:
    yield Calm(60 * live.minutes)


@calm
def rolling_deploy(live: Live, drawn: Random) -> Story:
    names = [*WORKERS, *PRODUCERS]
    drawn.shuffle(names)
    for name in names:
        live.restart(name, revision=2)
        yield Calm(3)
    yield Calm(75)


@calm
def killed_worker(live: Live, drawn: Random) -> Story:
    worker = drawn.choice(WORKERS)
    live.stop(worker, signal.SIGKILL)
    yield Calm(drawn.uniform(1, 15))
    live.start(worker)
    yield Calm(75)
