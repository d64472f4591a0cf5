"""What is wrong in a snapshot: each kind planted, and a snapshot that nearly has it."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from idemgate.audit.catalogue import CATALOGUE, RUNNING_KINDS
from idemgate.audit.findings import Finding
from idemgate.audit.running import BURIED_BY_OPERATOR, command_line, findings
from idemgate.audit.server import Seen, diagnose
from idemgate.audit.snapshot import (
    DeadSeen,
    FailingCall,
    FailingMessage,
    HeldKey,
    KnownVersion,
    Snapshot,
    TopicSeen,
    snapshot_as_facts,
)
from idemgate.core.activity import BOUNDS
from idemgate.presence.report import Counter, Process, RunningWork, Times, WorkFailure
from idemgate.topics.messages import BlockedGroup, Pause, Stats
from tests.for_each import for_each

NOW = datetime(2026, 12, 24, 18, tzinfo=UTC)
SOUND = Seen(
    {"redis_version": "7.2.0", "role": "master", "aof_enabled": 1}, {"appendfsync": "everysec"}, 0.0, 0.0, False, {}
)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def topic(name: str = "jobs", **facts: Any) -> TopicSeen:
    """A topic in which nothing is wrong; `late` is how long a message of it is due."""
    late = facts.pop("late", None)
    stats: dict[str, Any] = {
        "scheduled": 0, "ready": 0, "waiting": 0, "blocked": 0, "in_flight": 0, "dead": 0, "next_due": None,
        "oldest_due": None, "lateness": timedelta(), "oldest_blocked": None, "blocked_groups": (), "sampled": False,
        "paused": None, "counters": {},
    }  # fmt: skip
    if late is not None:
        stats |= {"ready": 1, "next_due": ago(late), "oldest_due": ago(late), "lateness": timedelta(seconds=late)}
    stats |= {known: facts.pop(known) for known in [*facts] if known in stats}
    return TopicSeen(
        name, 4, facts.pop("changing_to", None), Stats(**stats), **{"concurrency": None, "rate": None} | facts
    )


def process(pid: int = 1, **facts: Any) -> Process:
    """A worker of the topic "jobs" in which nothing is wrong. `counters` are increases of the last ten minutes."""
    counters = {
        name: n if isinstance(n, Counter) else Counter(n, n, n) for name, n in facts.pop("counters", {}).items()
    }
    known: dict[str, Any] = {
        "id": "0" * 32, "seen_at": NOW, "host": "web", "pid": pid, "version": "1", "program": "shop.py",
        "role": "worker", "started_at": ago(3600), "busy": 0, "places": 2, "topics": ("jobs",), "scopes": (),
        "times": {}, "last_minute": {}, "calls": (), "running": (), "failures": (), "refused": (), "held": (),
        "outdated": (), "adopted": (), "ahead": 0.0, "dropped": {},
    }  # fmt: skip
    return Process(**known | facts, counters=counters)


def snapshot(*topics: TopicSeen, processes: tuple[Process, ...] = (process(),), **facts: Any) -> Snapshot:
    return Snapshot("shop", NOW, facts.pop("servers", {"h:1": SOUND}), topics, processes, **facts)


def runs(age: float, key: str = "order-7", of: str = "jobs", max_run: int | None = None) -> RunningWork:
    return RunningWork(of, key, ago(age), "shop.py:7 ship", max_run)


def calls(*ages: float, max_run: int | None = 0, reported: float = 0) -> Snapshot:
    """A process with a guarded call of each of these ages."""
    works = tuple(runs(age, f"order-{n}", "charge", max_run) for n, age in enumerate(ages))
    return snapshot(processes=(process(topics=(), role="client", running=works, seen_at=ago(reported)),))


def lasted(seconds: float) -> Times:
    """The durations of handlers, one of which took this long."""
    counts = [0] * (len(BOUNDS) + 1)
    counts[next((n for n, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))] = 1
    return Times((), tuple(counts))


def hanging(*ages: float, times: Times | None = None, **facts: Any) -> Snapshot:
    """A worker with a place for each of these deliveries, and a due message that waits."""
    work = process(
        busy=len(ages), places=facts.pop("places", len(ages)), running=tuple(map(runs, ages)),
        times={} if times is None else {"jobs": times},
    )  # fmt: skip
    return snapshot(topic(**{"late": 40, "in_flight": len(ages)} | facts), processes=(work,))


def blocked(seconds: float) -> Snapshot:
    group = BlockedGroup("big", 9, ago(seconds))
    return snapshot(topic(blocked=9, oldest_blocked=group, blocked_groups=(group,)))


def versioned(version: float) -> Snapshot:
    return snapshot(topic(), versions=(KnownVersion("jobs", "order 7", "", round(version)),))


def fails(attempt: int, age: float = 5) -> Snapshot:
    return snapshot(failing_calls=(FailingCall("charge", "order-7", attempt, ago(age), "KeyError: 'address'"),))


def refused(age: float) -> Snapshot:
    rows = (WorkFailure("jobs", "order-7", None, "not a list", ago(age), None),)
    return snapshot(topic(), processes=(process(), process(2, topics=(), role="client", refused=rows)))


PAUSE = Pause(ago(301), "ann@host", "outage")
DEAD = DeadSeen("order-7", "KeyError: 'address'", ago(30), 1)
LONG_AGO = Counter(1, 0, 0)
Case = tuple[Snapshot, Snapshot]
CASES: dict[str, list[Case]] = {
    "topic-unserved": [
        (snapshot(topic(late=31), processes=()), snapshot(topic(late=29), processes=())),
        (snapshot(topic("mails", late=31)), snapshot(topic("mails", late=31, in_flight=1))),
        (
            snapshot(topic("mails", late=31)),
            snapshot(topic("mails", late=31), processes=(process(topics=("jobs", "mails")),)),
        ),
        # The report has no room for all topics
        (
            snapshot(topic("mails", late=31)),
            snapshot(topic("mails", late=31), processes=(process(dropped={"topics": 1}),)),
        ),
        (snapshot(topic("mails", late=31)), snapshot(topic("mails", late=31, paused=replace(PAUSE, since=ago(9))))),
    ],
    "handlers-hang": [
        (hanging(61, 70), hanging(59, 70)),
        (hanging(61, 70), hanging(61, 70, places=3)),
        # Handlers of this topic take that long
        (hanging(61, 70, times=lasted(9)), hanging(61, 70, times=lasted(90))),
        (hanging(101, 110, times=lasted(90)), hanging(301, 310, times=lasted(301))),
        # The limit of the topic is reached, and the worker has free places
        (hanging(61, 70, places=9, concurrency=2), hanging(61, 70, places=9, concurrency=3)),
        # Nothing waits
        (hanging(61), snapshot(topic(in_flight=1), processes=(process(busy=1, places=1, running=(runs(61),)),))),
        # A guarded call inside the handler is no second delivery
        (
            snapshot(topic(late=9), processes=(process(busy=1, places=1, running=(runs(61), runs(1, of="charge"))),)),
            snapshot(topic(late=9), processes=(process(busy=1, places=1, running=(runs(9), runs(61, of="charge"))),)),
        ),
    ],
    "ran-unguarded": [
        (
            snapshot(processes=(process(counters={"once.store_error.run": 1}),)),
            snapshot(processes=(process(counters={"once.store_error.run": LONG_AGO}),)),
        )
    ],
    "topic-late": [
        (snapshot(topic(late=61)), snapshot(topic(late=59))),
        (snapshot(topic(late=61, concurrency=1, in_flight=1)), snapshot(topic(late=61, ready=0))),
        (snapshot(topic(late=61, rate=2.5)), snapshot(topic(late=61, rate=2.5, changing_to=8))),
    ],
    "topic-paused": [
        (snapshot(topic(late=1, paused=PAUSE)), snapshot(topic(late=1, paused=replace(PAUSE, since=ago(299))))),
        (snapshot(topic(late=1, paused=PAUSE)), snapshot(topic(scheduled=3, paused=PAUSE))),
    ],
    "topic-abandoned": [
        (snapshot(topic("mails", dead=1)), snapshot(topic("jobs", dead=1))),
        (snapshot(topic("mails", scheduled=1)), snapshot(topic("mails"))),
        (snapshot(topic("mails", dead=1)), snapshot(topic("mails", dead=1), processes=())),
        (snapshot(topic("mails", dead=1)), snapshot(topic("mails", dead=1), processes=(process(started_at=ago(59)),))),
    ],
    "group-blocked": [(blocked(61), blocked(59))],
    "poison-message": [
        (
            snapshot(topic(), failing=(FailingMessage("jobs", "order-7", "", 3, NOW, "KeyError"),)),
            snapshot(topic(), failing=(FailingMessage("jobs", "order-7", "", 2, NOW, "KeyError"),)),
        ),
        (fails(3), fails(2)),
        (fails(3, 599), fails(3, 601)),
    ],
    "dead-letters": [
        (snapshot(topic(dead=1, letters=(DEAD,))), snapshot(topic(dead=1))),
        (
            snapshot(topic(dead=1, letters=(DEAD,))),
            snapshot(topic(dead=1, letters=(replace(DEAD, reason=f"{BURIED_BY_OPERATOR}: poison"),))),
        ),
    ],
    "messages-rejected": [
        (
            snapshot(processes=(process(counters={"consumer.rejected": 1}),)),
            snapshot(processes=(process(counters={"consumer.rejected": LONG_AGO, "consumer.failed": 9}),)),
        ),
        (
            snapshot(processes=(process(counters={"rabbitmq.rejected": 1}),)),
            snapshot(processes=(process(counters={"rabbitmq.failed": 9}),)),
        ),
        # A stream delivers again what failed, and Pub/Sub does not
        (
            snapshot(processes=(process(counters={"stream.dead": 1}),)),
            snapshot(processes=(process(counters={"stream.failed": 9, "list.rejected": 9}),)),
        ),
        (
            snapshot(processes=(process(counters={"channel.failed": 1}),)),
            snapshot(processes=(process(counters={"channel.in_progress": 9}),)),
        ),
    ],
    "broker-unavailable": [
        (
            snapshot(processes=(process(counters={"consumer.unsettled": 3}),)),
            snapshot(processes=(process(counters={"consumer.unsettled": 2}),)),
        ),
        (
            snapshot(
                processes=(process(counters={"consumer.unsettled": 1}), process(2, counters={"sqs.receive_failed": 2}))
            ),
            snapshot(processes=(process(counters={"sqs.receive_failed": Counter(9, 0, 2)}),)),
        ),
        (
            snapshot(processes=(process(counters={"kafka.poll_failed": 2, "kafka.send_failed": 1}),)),
            snapshot(processes=(process(counters={"kafka.poll_failed": 2, "kafka.paused": 5}),)),
        ),
    ],
    "payload-refused": [(refused(599), refused(601))],
    "version-ahead": [
        (versioned(NOW.timestamp() * 1000 + 61_000), versioned(NOW.timestamp() * 1000 + 59_000)),
        (versioned(NOW.timestamp() + 3600), versioned(NOW.timestamp() - 3600)),
        (versioned(NOW.timestamp() * 1_000_000 + 61_000_000), versioned(4711)),
    ],
    "key-held": [(snapshot(held=(HeldKey("charge", "order-7", ago(5), 1),)), snapshot())],
    "calls-hang": [
        (calls(3601), calls(3599)),
        (calls(11, max_run=10_000), calls(9, max_run=10_000)),
        # It had not when its process reported, and may have ended since
        (calls(11, max_run=10_000), calls(11, max_run=10_000, reported=2)),
        # It may run that long; it is the call of a version that does not report the limit
        (calls(3601), calls(3601, max_run=7_200_000)),
        (calls(3601), calls(3601, max_run=None)),
        # A delivery, while there are free places; handlers of this topic take minutes
        (hanging(3601, places=9, late=None), hanging(3599, places=9, late=None)),
        (hanging(3601, places=9, late=None), hanging(3601, places=9, late=None, times=lasted(301))),
    ],
    "process-clock": [
        (snapshot(processes=(process(ahead=6.0),)), snapshot(processes=(process(ahead=4.0),))),
        (snapshot(processes=(process(ahead=-6.0),)), snapshot(processes=(process(ahead=None),))),
    ],
    "leases-lost": [
        (
            snapshot(processes=(process(counters={"once.lost": 1}), process(2, counters={"worker.lease_lost": 2}))),
            snapshot(processes=(process(counters={"once.lost": 2}),)),
        ),
        # A lease that is lost while the work runs is found lost again when it ends
        (
            snapshot(processes=(process(counters={"worker.lease_lost": 3, "worker.lost": 3}),)),
            snapshot(processes=(process(counters={"worker.lease_lost": 2, "worker.lost": 2}),)),
        ),
    ],
    "deliveries-lapse": [
        # A worker that was killed once leaves at most what it held
        (
            snapshot(processes=(process(counters={"worker.lapsed": 5}),)),
            snapshot(processes=(process(counters={"worker.lapsed": 4}),)),
        ),
        (
            snapshot(processes=(process(places=0, counters={"worker.lapsed": 65}),)),
            snapshot(processes=(process(places=0, counters={"worker.lapsed": 64}),)),
        ),
    ],
    "store-unavailable": [
        (
            snapshot(processes=(process(counters={"worker.store_unavailable": 1}),)),
            snapshot(processes=(process(counters={"worker.store_unavailable": Counter(1, 0, 1)}),)),
        )
    ],
    "completion-lost": [
        (
            snapshot(processes=(process(counters={"once.completion_lost": 1}),)),
            snapshot(processes=(process(counters={"once.completion_lost": LONG_AGO}),)),
        )
    ],
    "policy-outdated": [
        (
            snapshot(processes=(process(counters={"topic.policy_adopted": LONG_AGO}),)),
            snapshot(processes=(process(counters={"topic.policy_adopted": LONG_AGO}, started_at=ago(599)),)),
        )
    ],
    "versions-differ": [
        (
            snapshot(processes=(process(), process(2, version="2"))),
            snapshot(processes=(process(), process(2, version="2", started_at=ago(599)))),
        ),
        (
            snapshot(processes=(process(), process(2, version="2"))),
            snapshot(processes=(process(), process(2, version="2", program="other.py"))),
        ),
    ],
    "changing": [
        (snapshot(topic(changing_to=8)), snapshot(topic())),
        (snapshot(topic(changing_to=0)), snapshot(topic())),
    ],
}  # fmt: skip


def test_these_are_all_kinds() -> None:
    assert {*CASES} == {*RUNNING_KINDS, "changing"}


@for_each("kind", CASES)
def test_a_kind_is_found_where_it_is_and_nothing_where_it_nearly_is(kind: str) -> None:
    for there, near in CASES[kind]:
        assert [one.kind for one in findings(there)] == [kind], there
        assert [one for one in findings(near) if one.kind == kind] == [], near


@for_each("kind", CASES)
def test_a_finding_says_what_it_is_about_and_what_mends_it(kind: str) -> None:
    for there, _ in CASES[kind]:
        [one] = findings(there)
        assert one.of or one.where or kind == "deliveries-lapse"
        assert shlex.split(one.mend)[0] == "idemgate"
        assert one.what.isprintable()
        json.dumps(snapshot_as_facts(there))


def found(there: Snapshot) -> Finding:
    [one] = findings(there)
    return one


@pytest.mark.parametrize(
    ("dead", "others", "key", "what"),
    [
        (1, (), "order-7", "1 message died lately: \"KeyError: 'address'\" of 'order-7'"),
        (2, ("order-7",), "order-7", "2 messages died lately: \"KeyError: 'address'\" of 'order-7'"),
        (
            40,
            ("a", "b", "c"),
            "",
            "at least 4 messages died lately: \"KeyError: 'address'\" of 'order-7', 'a', 'b' and 1 more",
        ),
    ],
)
def test_dead_letters_are_counted_as_far_as_they_were_read(
    dead: int, others: tuple[str, ...], key: str, what: str
) -> None:
    letters = (DEAD, *(replace(DEAD, key=other) for other in others))
    finding = found(snapshot(topic(dead=dead, letters=letters)))
    assert (finding.of, finding.key, finding.what) == ("jobs", key, what)


def test_commands_name_what_they_mend() -> None:
    assert found(CASES["topic-paused"][0][0]).mend == "idemgate topic resume jobs"
    assert found(CASES["topic-abandoned"][0][0]).mend == "idemgate topic show mails"
    assert found(CASES["changing"][0][0]).mend == "idemgate topic reshard jobs 8"
    assert found(CASES["changing"][1][0]).mend == "idemgate topic delete jobs"
    assert found(CASES["version-ahead"][0][0]).mend == "idemgate topic reset-version jobs 'order 7'"
    assert found(CASES["key-held"][0][0]).mend == "idemgate key show order-7 --scope charge"
    assert found(CASES["dead-letters"][0][0]).mend == "idemgate dead redrive jobs --reason KeyError"
    assert found(CASES["poison-message"][0][0]).mend == "idemgate topic bury jobs order-7"
    assert found(CASES["poison-message"][1][0]).mend == "idemgate key show order-7 --scope charge"


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ({"mails-v2": 7, "jobs": 9}, "mails-v2"),  # its producers were renamed, too
        ({"letters": 0, "jobs": 9}, "letters"),  # its producers were not
        ({"mails-eu": 7, "mails-us": 7, "letters": 0}, None),
        ({"letters": 0, "jobs": 0}, None),
        ({"letters": 1, "jobs": 1}, None),
    ],
)
def test_a_topic_without_a_worker_is_looked_for_under_another_name(served: dict[str, int], name: str | None) -> None:
    others = [topic(one, counters={"accepted": n}) for one, n in served.items()]
    workers = (process(topics=tuple(served)),)
    for there in (topic("mails", late=31), topic("mails", dead=1)):
        what = found(snapshot(there, *others, processes=workers)).what
        hint = f" (if its name is {name!r} now: idemgate topic transfer mails {name})"
        assert what.endswith(hint) if name else "if its name" not in what


def test_the_oldest_call_of_a_scope_is_named_with_the_line_where_it_hangs() -> None:
    one = found(calls(3700, 9, 3800))
    assert one.what == "runs for more than 3600 s at shop.py:7 ship, and 1 other of the scope"
    assert (one.of, one.key, one.where, one.since) == ("charge", "order-2", "web:1", ago(3800))
    assert one.mend == "idemgate worker ls --of charge --key order-2"
    assert found(calls(11, max_run=10_000)).what == "runs for more than its max_run of 10 s at shop.py:7 ship"
    several = found(hanging(3601, 3700, 3800, places=9, late=None))
    assert several.what == "runs for more than 3600 s at shop.py:7 ship, and 2 others of the topic"


def test_messages_in_a_group_are_named_with_it() -> None:
    there = snapshot(
        topic(),
        failing=(FailingMessage("jobs", "k", "big one", 3, NOW, "KeyError"),),
        versions=(KnownVersion("jobs", "k", "big one", round(NOW.timestamp()) + 100),),
    )
    assert [one.mend.partition(" jobs ")[2] for one in findings(there)] == ["k --group 'big one'"] * 2


def test_names_that_look_like_options_are_no_options() -> None:
    there = snapshot(topic(), failing=(FailingMessage("jobs", "-n", "--all", 3, NOW, "KeyError"),))
    assert found(there).mend == "idemgate topic bury --group=--all -- jobs -n"
    held = snapshot(held=(HeldKey("-s", "--", NOW, 1),))
    assert found(held).mend == "idemgate key show --scope=-s -- --"


@for_each("words", [["a b", "it's", "\x1b[31m", "\\x1b", "'\n", "é\u202e", ""], ["plain"]])
def test_a_command_survives_a_shell(words: list[str]) -> None:
    line = command_line("printf", "%s|", *words)
    assert line.isprintable()
    ran = subprocess.run(["bash", "-c", line], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert ran.stdout.decode() == "".join(f"{word}|" for word in words)


@for_each(
    ("reason", "word"),
    [
        ("shop.errors.NoStock: of 7", "shop.errors.NoStock"),
        ("buried by ann", "'buried by ann'"),
        ("at 12:30 it failed", "'at 12:30 it failed'"),
        ("Bad: \x1b[31m", "Bad"),
        ("", "--all"),
    ],
)
def test_dead_letters_are_redriven_by_what_their_reasons_share(reason: str, word: str) -> None:
    letters = (replace(DEAD, reason=reason), replace(DEAD, key="order-8", reason=reason))
    one = found(snapshot(topic(dead=9, letters=letters)))
    assert one.mend.split(" ", 4)[-1].removeprefix("--reason ") == word
    assert dict(one.numbers) == {"lately": 2, "in_all": 9}


def test_what_is_critical_comes_first() -> None:
    there = snapshot(topic("a", late=9, paused=PAUSE), topic("b", late=31), processes=(process(ahead=60.0),))
    assert [one.kind for one in findings(there)] == ["topic-unserved", "topic-paused", "process-clock"]
    assert [one.severity for one in findings(there)] == ["critical", "warning", "warning"]


# -- servers ----------------------------------------------------------------------------------------------------------

WRONG = {
    "full": ({"maxmemory": 100, "used_memory": 96, "total_system_memory": 900}, "memory", "CONFIG SET maxmemory 200"),
    "nearly full": ({"maxmemory": 100, "used_memory": 81}, "memory", ""),
    "evicts": (
        {"maxmemory": 9, "maxmemory_policy": "allkeys-lru"},
        "eviction",
        "CONFIG SET maxmemory-policy noeviction",
    ),
    "evicted": ({"evicted_keys": 3}, "evicted", "idemgate doctor --audit"),
    "full, and far beyond a limit that was lowered": (
        {"maxmemory": 100, "used_memory": 300, "total_system_memory": 900},
        "memory",
        "CONFIG SET maxmemory 600",
    ),
    "full, and the machine has no more": (
        {"maxmemory": 100, "used_memory": 300, "total_system_memory": 800},
        "memory",
        "",
    ),
    "no append-only file, no snapshots": ({"aof_enabled": 0}, "persistence", "CONFIG SET appendonly yes"),
    "a replica": ({"role": "slave"}, "role", ""),
}


@for_each("name", WRONG)
def test_what_is_wrong_with_a_server_is_found_with_its_command(name: str) -> None:
    info, kind, command = WRONG[name]
    one = found(snapshot(servers={"127.0.0.1:7": SOUND._replace(info={**SOUND.info, **info})}))
    assert (one.kind, one.where) == (kind, "127.0.0.1:7")
    assert one.mend == (f"redis-cli -h 127.0.0.1 -p 7 {command}" if command.startswith("CONFIG") else command)
    assert one.severity == ("warning" if name == "nearly full" else "critical")


def test_a_server_behind_a_socket_is_named_by_its_path() -> None:
    seen = SOUND._replace(info={**SOUND.info, "maxmemory": 9, "maxmemory_policy": "allkeys-lru"})
    command = "redis-cli -s /run/redis.sock CONFIG SET maxmemory-policy noeviction"
    assert found(snapshot(servers={"/run/redis.sock": seen})).mend == command


def test_refused_payloads_are_counted_by_the_store() -> None:
    there = refused(599)
    counted = topic(counters={"refused_payload": 1200, "refused_too_large": 34})
    one = found(replace(there, topics=(counted,)))
    assert (one.numbers["number"], found(there).numbers["number"]) == (1234, 1)
    assert one.what == "1,234 triggers refused in all, the last of 'order-7': not a list"


@for_each(
    ("seconds", "in_flight", "facts", "says"),
    [
        (None, 1, {}, True), (9, 1, {}, False), (None, 0, {}, False), (None, 1, {"started_at": ago(599)}, False),
        (None, 1, {"dropped": {"times": 1}}, False),
    ],
)  # fmt: skip
def test_a_late_topic_tells_a_hang_from_slowness(
    seconds: float | None, in_flight: int, facts: dict[str, Any], says: bool
) -> None:
    times = {} if seconds is None else {"jobs": lasted(seconds)}
    one = found(snapshot(topic(late=61, in_flight=in_flight), processes=(process(places=9, times=times, **facts),)))
    assert ("no handler ended in ten minutes" in one.what) is says


def test_a_late_topic_says_where_its_oldest_handler_is() -> None:
    work = process(busy=3, places=9, running=(runs(3), runs(18), runs(40, of="mails")), times={"jobs": lasted(20)})
    one = found(snapshot(topic(late=61, in_flight=2, concurrency=2), processes=(work,)))
    assert one.what == (
        "1 message is due, 2 in flight, as many as its concurrency of 2 allows;"
        " the oldest handler runs for 18 s at shop.py:7 ship"
    )


def test_an_outdated_policy_is_named_with_its_topic_and_both_revisions() -> None:
    facts: dict[str, Any] = {"counters": {"topic.policy_adopted": LONG_AGO}, "adopted": (("jobs", 3, 2),)}
    [one] = findings(snapshot(topic(), processes=(process(**facts), process(2, **facts))))
    assert one.what == "2 processes declare an older revision of a policy: of 'jobs' 2, and the store has 3"
    assert one.of == "jobs"


def test_messages_that_wait_for_their_group_are_counted_in_a_sentence() -> None:
    for count, said in ((1, "1 message of group 'big' is due and waits"), (1240, "1,240 messages of group 'big' are")):
        group = BlockedGroup("big", count, ago(61))
        one = found(snapshot(topic(blocked=count, oldest_blocked=group, blocked_groups=(group,))))
        assert one.what.startswith(said)


def test_a_clock_that_is_ahead_comes_before_the_versions_that_it_sent() -> None:
    there = versioned(NOW.timestamp() + 3600)
    clock, version = findings(replace(there, processes=(process(ahead=3600.0), process(2, ahead=-9.0))))
    assert (clock.kind, version.kind) == ("process-clock", "version-ahead")
    assert version.what.endswith("A reset is undone while web:1 sends with a clock that is ahead")


@for_each("info", [{"maxmemory_policy": "allkeys-lru"}, {"connected_slaves": 1}, {"aof_enabled": 0}])
def test_advice_on_settings_is_left_to_the_doctor(info: dict[str, Any]) -> None:
    seen = SOUND._replace(info={**SOUND.info, **info}, config={"save": "60 1"})
    assert [check.state for check in diagnose(seen) if check.state != "ok"].count("warning")
    assert findings(snapshot(servers={"h:1": seen})) == []


def test_a_server_that_says_nothing_is_no_finding() -> None:
    assert findings(snapshot(servers={"h:1": Seen({}, None, None, 0.0, False, {})})) == []


def test_the_clock_of_this_machine_is_compared() -> None:
    one = found(snapshot(servers={"h:1": SOUND._replace(apart=9.0)}))
    assert (one.kind, one.severity) == ("clock", "warning")
    assert CATALOGUE["clock"].severity == "critical"


@pytest.mark.parametrize("name", WRONG)
def test_a_reduced_server_is_judged_alike_and_has_no_password(name: str) -> None:
    info, config = {**SOUND.info, **WRONG[name][0], "db0": {"keys": 1}}, {"requirepass": "secret", "save": "60 1"}
    whole = SOUND._replace(info=info, config=config)
    assert diagnose(whole.reduce()) == diagnose(whole)
    assert "secret" not in str(whole.reduce())
    assert whole.reduce()._replace(config=None).reduce().config is None
