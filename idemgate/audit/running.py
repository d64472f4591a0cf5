"""Find what is wrong in a running namespace, by pure functions over a snapshot. The catalogue has the thresholds."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from idemgate.audit.catalogue import CATALOGUE
from idemgate.audit.findings import Finding
from idemgate.audit.server import diagnose
from idemgate.audit.snapshot import Snapshot, TopicSeen
from idemgate.core.activity import BOUNDS
from idemgate.core.text import cut
from idemgate.presence.report import Process, RunningWork

__all__ = ["BURIED_BY_OPERATOR", "command_line", "findings", "group_by_topic", "limit_of", "verb_line"]

_SETTINGS = ("eviction", "persistence", "replicas", "server")
"""The checks whose warnings are advice on settings. The doctor gives it; nothing is wrong at the moment."""
_COUNTERS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "store-unavailable": ("last_minute", (("worker.store_unavailable",),)),
    "leases-lost": ("last_10_minutes", (("worker.lease_lost", "worker.lost"), ("once.lease_lost", "once.lost"))),
    "ran-unguarded": ("last_10_minutes", (("once.store_error.run",), ("once.store_error.local",))),
    "completion-lost": ("last_10_minutes", (("once.completion_lost",),)),
    "messages-rejected": (
        "last_10_minutes",
        (
            ("consumer.rejected",), ("rabbitmq.rejected",), ("stream.dead",), ("list.dead",), ("channel.failed",),
            ("channel.rejected",),
        ),
    ),
    "broker-unavailable": (
        "last_10_minutes",
        (
            ("consumer.unsettled",), ("rabbitmq.unsettled",), ("sqs.receive_failed",), ("kafka.poll_failed",),
            ("kafka.send_failed",),
        ),
    ),
}  # fmt: skip
"""The kinds that are an increase of counters, summed over all processes: since when, and of which counters.

Counters that stand together may count the same event, while the work runs and when it ends: only the larger one counts.
"""
BURIED_BY_OPERATOR = "buried by an operator"
"""The reason of `topic bury` without a reason: its letters are no news."""
_TEN_MINUTES = 600
"""Seconds of which a report has the durations of handlers, and after which a failed guarded call is no news."""
_MANY_PLACES = 32
"""The places of a worker, if none reports any."""


def findings(snapshot: Snapshot) -> list[Finding]:
    """Return what is wrong, the most severe first, then in the order of the catalogue. It sends nothing."""
    rules: tuple[Callable[[Snapshot], Iterator[Finding]], ...] = (
        _judge_servers,
        _judge_topics,
        _judge_keys,
        _judge_processes,
    )
    order = {kind: number for number, kind in enumerate(CATALOGUE)}
    found = [one for rule in rules for one in rule(snapshot)]
    return sorted(found, key=lambda one: (one.severity != "critical", order[one.kind]))


def limit_of(kind: str) -> float:
    """Return the number from which on something is a finding of this kind."""
    return CATALOGUE[kind].threshold


def command_line(*words: str) -> str:
    """Return a command as a shell reads it. A word that cannot be printed is written with escapes ($'...')."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escape(word) for word in words)


def verb_line(noun: str, verb: str, *required: str, **options: str | bool) -> str:
    """Return the command of a verb of `idemgate`. A text that begins like an option is not read as one."""
    named = list[str]()
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        named += [flag] if value is True else [f"{flag}={value}"] if _is_like_option(str(value)) else [flag, str(value)]
    if any(map(_is_like_option, required)):
        return command_line("idemgate", noun, verb, *named, "--", *required)
    return command_line("idemgate", noun, verb, *required, *named)


def _is_like_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _escape(word: str) -> str:
    escaped = [one if one.isprintable() and one not in "\\'" else f"\\U{ord(one):08x}" for one in word]
    return f"$'{''.join(escaped)}'"


# -- servers ----------------------------------------------------------------------------------------------------------


def _judge_servers(snapshot: Snapshot) -> Iterator[Finding]:
    for name, seen in snapshot.servers.items():
        for check in diagnose(seen):
            if check.state == "critical" or (check.state == "warning" and check.name not in _SETTINGS):
                mend = _redis_cli(name, check.mend)
                yield Finding(check.name, "", check.what, mend, where=name, lesser=check.state)


def _redis_cli(server: str, mend: str) -> str:
    """Return the command for this server if the doctor's advice is one, else ""."""
    words = mend.partition("   (")[0].split()
    if words[:1] == ["idemgate"]:
        return command_line(*words)
    if words[:1] != ["CONFIG"]:
        return ""
    host, _, port = server.rpartition(":")
    where = ("-h", host, "-p", port) if port.isdigit() else ("-s", server)
    return command_line("redis-cli", *where, *words)


# -- topics -----------------------------------------------------------------------------------------------------------


def _judge_topics(snapshot: Snapshot) -> Iterator[Finding]:
    by_topic = group_by_topic(snapshot.processes)
    served = [one for one in snapshot.topics if by_topic[one.name]]
    unlisted = any(one.dropped.get("topics") for one in snapshot.processes)
    for topic in snapshot.topics:
        serving = by_topic[topic.name]
        yield from _judge_dead_letters(topic)
        if topic.changing_to is not None:
            yield _report_change(topic, topic.changing_to)
        elif topic.stats.paused is not None:
            yield from _judge_pause(snapshot, topic)
        elif serving or topic.stats.in_flight or unlisted:
            hanging = [*_judge_hanging(topic, serving)]
            yield from hanging or _judge_lateness(snapshot, topic, serving)
            yield from _judge_groups(snapshot, topic)
        else:
            yield from _judge_unserved(snapshot, topic, served)


def group_by_topic(processes: Iterable[Process]) -> defaultdict[str, list[Process]]:
    """Return the processes that serve each topic."""
    found = defaultdict[str, list[Process]](list)
    for one in processes:
        for name in one.topics:
            found[name].append(one)
    return found


def _report_change(topic: TopicSeen, slots: int) -> Finding:
    what = f"it gets {slots} slots" if slots else "it is being deleted"
    words = ("reshard", topic.name, str(slots)) if slots else ("delete", topic.name)
    return Finding("changing", "", what, verb_line("topic", *words), topic.name)


def _judge_pause(snapshot: Snapshot, topic: TopicSeen) -> Iterator[Finding]:
    stats = topic.stats
    assert stats.paused is not None
    if stats.oldest_due is None or _age(snapshot, stats.paused.since) < limit_of("topic-paused"):
        return
    why = f" ({stats.paused.reason})" if stats.paused.reason else ""
    what = f"paused by {stats.paused.by}{why}, and {_count(_due(topic), 'message')} due"
    mend = verb_line("topic", "resume", topic.name)
    yield Finding(
        "topic-paused", "", what, mend, topic.name, since=stats.paused.since, numbers={"due": _due(topic)}
    )  # fmt: skip


def _judge_unserved(snapshot: Snapshot, topic: TopicSeen, served: Sequence[TopicSeen]) -> Iterator[Finding]:
    """Judge a topic that no process serves. `served` are those that a process serves."""
    stats, renamed = topic.stats, _guess_name(topic, served)
    if stats.oldest_due is not None:
        if stats.lateness.total_seconds() >= limit_of("topic-unserved"):
            what = f"{_count(_due(topic), 'message')} due, and no process takes any{renamed}"
            mend, numbers = verb_line("worker", "ls"), {"due": _due(topic)}
            yield Finding("topic-unserved", "", what, mend, topic.name, since=stats.oldest_due, numbers=numbers)
        return
    workers = [one for one in snapshot.processes if one.topics]
    settled = workers and all(_age(snapshot, one.started_at) >= limit_of("topic-abandoned") for one in workers)
    if settled and stats.pending + stats.dead:
        what = f"{_count(stats.dead, 'dead letter', '')} and {_count(stats.pending, 'pending message', '')}"
        mend = verb_line("topic", "show", topic.name)
        numbers = {"dead": stats.dead, "pending": stats.pending}
        yield Finding(
            "topic-abandoned", "", f"{what}, and no process serves the topic{renamed}", mend, topic.name,
            numbers=numbers,
        )  # fmt: skip


def _guess_name(topic: TopicSeen, served: Sequence[TopicSeen]) -> str:
    """Return what to do if a served topic is this one under another name: the only one like it, or the only unused."""
    similar = [one.name for one in served if topic.name in one.name or one.name in topic.name]
    names = similar or [one.name for one in served if not one.stats["accepted"]]
    if len(names) != 1:
        return ""
    return f" (if its name is {names[0]!r} now: {verb_line('topic', 'transfer', topic.name, names[0])})"


def _judge_lateness(snapshot: Snapshot, topic: TopicSeen, serving: Sequence[Process]) -> Iterator[Finding]:
    """Judge messages that are ready: they wait for no other delivery."""
    stats = topic.stats
    since = stats.next_due
    if not stats.ready or since is None or _age(snapshot, since) < limit_of("topic-late"):
        return
    busy, places = sum(one.busy for one in serving), sum(one.places for one in serving)
    what = f"{_count(stats.ready, 'message')} due, {stats.in_flight} in flight"
    if topic.concurrency is not None and stats.in_flight >= topic.concurrency:
        what += f", as many as its concurrency of {topic.concurrency} allows"
    elif topic.rate is not None:
        what += f", with a rate of {topic.rate:g}/s"
    elif places:
        what += f"; its workers use {busy} of {places} places"
    if running := [work for one in serving for work in one.running if work.of == topic.name]:
        oldest = min(running, key=lambda work: work.since)
        where = f" at {oldest.location}" if oldest.location else ""
        what += f"; the oldest handler runs for {_age(snapshot, oldest.since):.0f} s{where}"
    if stats.in_flight and _ended_none(snapshot, topic, serving):
        what += "; no handler ended in ten minutes"
    mend = verb_line("worker", "ls", of=topic.name)
    numbers = {"ready": stats.ready, "in_flight": stats.in_flight, "busy": busy, "places": places}
    yield Finding("topic-late", "", what, mend, topic.name, since=since, numbers=numbers)


def _ended_none(snapshot: Snapshot, topic: TopicSeen, serving: Sequence[Process]) -> bool:
    """Return True if all processes that serve a topic ran for ten minutes, and no handler of it ended in them."""
    return bool(serving) and not any(
        _age(snapshot, one.started_at) < _TEN_MINUTES
        or one.dropped.get("times")
        or any(one.times[topic.name].handling if topic.name in one.times else ())
        for one in serving
    )


def _judge_groups(snapshot: Snapshot, topic: TopicSeen) -> Iterator[Finding]:
    group = topic.stats.oldest_blocked
    if group is None or _age(snapshot, group.oldest_due) < limit_of("group-blocked"):
        return
    wait = "is due and waits" if group.count == 1 else "are due and wait"
    what = f"{_count(group.count, 'message', '')} of group {group.group!r} {wait} for its deliveries"
    mend = verb_line("topic", "show", topic.name)
    yield Finding(
        "group-blocked", "", what, mend, topic.name, since=group.oldest_due,
        numbers={"blocked": group.count, "blocked_in_all": topic.stats.blocked},
    )  # fmt: skip


def _judge_hanging(topic: TopicSeen, serving: Sequence[Process]) -> Iterator[Finding]:
    """Judge a topic whose due messages get no place, because handlers that run for long have all of them."""
    if topic.stats.oldest_due is None:
        return
    long = [(one, [work for work in one.running if _runs_long(one, work)]) for one in serving]
    mine = sorted((work for _, works in long for work in works if work.of == topic.name), key=lambda work: work.since)
    full = all(one.places and one.busy >= one.places and works == [*_list_deliveries(one)] for one, works in long)
    if mine and (full or (topic.concurrency is not None and len(mine) >= topic.concurrency)):
        oldest = mine[0]
        places = topic.concurrency if not full else sum(one.places for one in serving)
        where = f" at {oldest.location}" if oldest.location else ""
        what = (
            f"all {places} places are taken for more than {limit_of('handlers-hang'):g} s, the oldest by {oldest.key!r}"
        )
        mend = verb_line("worker", "ls", of=topic.name)
        numbers = {"hanging": len(mine), "due": _due(topic)}
        names = sorted(one.name for one, works in long if works)
        yield Finding(
            "handlers-hang", oldest.key, f"{what}{where}", mend, topic.name, _some(names), oldest.since, numbers
        )  # fmt: skip


def _list_deliveries(process: Process) -> Iterator[RunningWork]:
    """Yield the deliveries of a report. Guarded calls run inside of them, or in no worker."""
    return (work for work in process.running if work.of in process.topics)


def _runs_long(process: Process, work: RunningWork) -> bool:
    """Return True if a delivery runs for longer than handlers of the topic did in the last ten minutes."""
    if work.of not in process.topics:
        return False
    usual = (
        [number for number, n in enumerate(process.times[work.of].handling) if n] if work.of in process.times else []
    )
    if usual and usual[-1] == len(BOUNDS):
        return False  # they run for minutes
    most = max(limit_of("handlers-hang"), BOUNDS[usual[-1]] if usual else 0)
    return _ran_for(process, work) >= most


def _judge_dead_letters(topic: TopicSeen) -> Iterator[Finding]:
    """Yield a finding for each reason of the newest dead letters. The same reason is the same type of exception."""
    by_reason: defaultdict[str, list[int]] = defaultdict(list)
    for number, letter in enumerate(topic.letters):
        if not letter.reason.startswith(BURIED_BY_OPERATOR):
            by_reason[_type_of(letter.reason)].append(number)
    for reason, numbers in by_reason.items():
        letters = [topic.letters[number] for number in numbers]
        keys = [*dict.fromkeys(letter.key for letter in letters)]
        least = "at least " if topic.stats.dead > len(topic.letters) else ""  # of each slot the newest few were read
        counted = f"{least}{_count(len(letters), 'message', '')}"
        what = f"{counted} died lately: {cut(letters[0].reason, 160)!r} of {_some(map(repr, keys))}"
        which: dict[str, str | bool] = {"reason": reason} if reason else {"all": True}
        mend = verb_line("dead", "redrive", topic.name, **which)
        since = min(letter.died_at for letter in letters)
        yield Finding(
            "dead-letters", "" if len(keys) > 1 else keys[0], what, mend, topic.name, since=since,
            numbers={"lately": len(letters), "in_all": topic.stats.dead},
        )  # fmt: skip


def _type_of(reason: str) -> str:
    """Return what letters with the same failure share of their reasons: the type of the exception, if there is one."""
    head, colon, _ = reason.partition(":")
    text = head if colon and head.replace(".", "").replace("_", "").isalnum() else reason
    return next(iter(text.splitlines()), "")


# -- keys -------------------------------------------------------------------------------------------------------------


def _judge_keys(snapshot: Snapshot) -> Iterator[Finding]:
    for message in snapshot.failing:
        if message.attempts >= limit_of("poison-message"):
            what = f"failed {message.attempts} times, and is tried again: {message.error}"
            mend = verb_line("topic", "bury", message.topic, message.key, **_group(message.group))
            numbers = {"attempts": message.attempts}
            yield Finding("poison-message", message.key, what, mend, message.topic, numbers=numbers)
    for call in snapshot.failing_calls:
        if call.attempt >= limit_of("poison-message") and _age(snapshot, call.at) < _TEN_MINUTES:
            what = f"failed in attempt {call.attempt}, and may be tried again: {call.error}"
            mend, numbers = verb_line("key", "show", call.key, scope=call.scope), {"attempts": call.attempt}
            yield Finding("poison-message", call.key, what, mend, call.scope, numbers=numbers, of_scope=True)
    for key in snapshot.held:
        # It decides nothing: --again runs work that may be done.
        mend = verb_line("key", "show", key.key, scope=key.scope)
        what = f"waits for a decision since its attempt {key.attempts}"
        yield Finding("key-held", key.key, what, mend, key.scope, since=key.since, of_scope=True)
    yield from _judge_calls(snapshot)
    fast = [one.name for one in snapshot.processes if (one.ahead or 0) >= limit_of("process-clock")]
    undone = f". A reset is undone while {_some(fast)} sends with a clock that is ahead" if fast else ""
    for known in snapshot.versions:
        ahead = _seconds_ahead(known.version, snapshot.taken_at)
        if ahead is not None and ahead >= limit_of("version-ahead"):
            what = f"its version {known.version} is a time {_span(ahead)} ahead of the server's clock{undone}"
            mend = verb_line("topic", "reset-version", known.topic, known.key, **_group(known.group))
            yield Finding("version-ahead", known.key, what, mend, known.topic, numbers={"ahead": ahead})


def _judge_calls(snapshot: Snapshot) -> Iterator[Finding]:
    """Judge guarded calls that run for too long: longer than their `max_run` or, without one, an hour.

    So are deliveries that run for an hour, and longer than usual.
    """
    found: defaultdict[tuple[str, bool], list[tuple[datetime, str, RunningWork]]] = defaultdict(list)
    for one in snapshot.processes:
        for work in one.running:
            of_scope = work.max_run is not None  # else it is of a topic, or a version that does not report `max_run`
            most_seconds = work.max_run / 1000 if work.max_run else limit_of("calls-hang")
            if _ran_for(one, work) >= most_seconds and (of_scope or _runs_long(one, work)):
                found[work.of, of_scope].append((work.since, one.name, work))
    for (of, of_scope), hanging in found.items():
        since, process, oldest = min(hanging, key=lambda one: one[0])
        most = f"its max_run of {oldest.max_run / 1000:g}" if oldest.max_run else f"{limit_of('calls-hang'):g}"
        where = f" at {oldest.location}" if oldest.location else ""
        others = f", and {_count(len(hanging) - 1, 'other', '')} of the {'scope' if of_scope else 'topic'}"
        mend, numbers = verb_line("worker", "ls", of=of, key=oldest.key), {"hanging": len(hanging)}
        what = f"runs for more than {most} s{where}{others if len(hanging) > 1 else ''}"
        yield Finding("calls-hang", oldest.key, what, mend, of, process, since, numbers, of_scope=of_scope)


def _ran_for(process: Process, work: RunningWork) -> float:
    """Return for how many seconds the work ran at its process's report. It may have ended since."""
    return (process.seen_at - work.since).total_seconds()


def _group(name: str) -> dict[str, str]:
    return {"group": name} if name else {}


def _seconds_ahead(version: int, now: datetime) -> float | None:
    """Return how far a version is ahead of the clock if it is a time in s, ms or us; None if it is none.

    A time of the last or the next ten years is taken for one.
    """
    years = timedelta(days=3653).total_seconds()
    for unit in (1, 1_000, 1_000_000):
        ahead = version / unit - now.timestamp()
        if abs(ahead) < years:
            return ahead
    return None


# -- processes --------------------------------------------------------------------------------------------------------


def _judge_processes(snapshot: Snapshot) -> Iterator[Finding]:
    for kind in _COUNTERS:
        yield from _judge_counters(snapshot, kind)
    yield from _judge_refused(snapshot)
    yield from _judge_lapses(snapshot)
    yield from _judge_clocks(snapshot)
    yield from _judge_policies(snapshot)
    yield from _judge_versions(snapshot)


def _judge_counters(snapshot: Snapshot, kind: str) -> Iterator[Finding]:
    span, groups = _COUNTERS[kind]
    rose = {
        one.name: sum(
            max((getattr(one.counters[name], span) for name in names if name in one.counters), default=0)
            for names in groups
        )
        for one in snapshot.processes
    }
    total = sum(rose.values())
    if total >= limit_of(kind):
        worst = sorted((name for name in rose if rose[name]), key=lambda name: -rose[name])
        names = [name for names in groups for name in names if any(name in one.counters for one in snapshot.processes)]
        what = f"{total} in the {span.replace('_', ' ')}: {', '.join(names)}"
        mend = verb_line("worker", "show", worst[0])
        yield Finding(kind, "", what, mend, where=_some(worst), numbers={"number": total, "processes": len(worst)})


_REFUSED = ("refused_payload", "refused_too_large")
"""The counters of a topic that count refused triggers."""


def _judge_refused(snapshot: Snapshot) -> Iterator[Finding]:
    by_topic: defaultdict[str, list[tuple[datetime, str, str, str]]] = defaultdict(list)
    for one in snapshot.processes:
        for row in one.refused:
            if _age(snapshot, row.at) < limit_of("payload-refused"):
                by_topic[row.of].append((row.at, row.key, row.error, one.name))
    stored = {one.name: sum(map(one.stats.__getitem__, _REFUSED)) for one in snapshot.topics}
    for topic, rows in by_topic.items():
        _, key, error, process = max(rows)
        number = max(len(rows), stored.get(topic, 0))  # a process remembers the newest few only
        what = f"{_count(number, 'trigger', '')} refused in all, the last of {key!r}: {error}"
        mend, numbers = verb_line("worker", "show", process), {"number": number}
        yield Finding("payload-refused", key, what, mend, topic, process, min(rows)[0], numbers)


def _judge_lapses(snapshot: Snapshot) -> Iterator[Finding]:
    """Judge leases of workers that died. One death lapses at most what a worker holds."""
    counted = [one.counters["worker.lapsed"] for one in snapshot.processes if "worker.lapsed" in one.counters]
    lapsed = sum(counter.last_10_minutes for counter in counted)
    places = max((one.places for one in snapshot.processes), default=0) or _MANY_PLACES
    if lapsed > places * limit_of("deliveries-lapse"):
        what = f"{lapsed} deliveries of workers that died came back in ten minutes"
        mend = verb_line("worker", "ls")
        yield Finding("deliveries-lapse", "", what, mend, numbers={"number": lapsed})


def _judge_clocks(snapshot: Snapshot) -> Iterator[Finding]:
    limit = limit_of("process-clock")
    wrong = [(one.ahead, one.name) for one in snapshot.processes if one.ahead is not None and abs(one.ahead) >= limit]
    for host in dict.fromkeys(name.rpartition(":")[0] for _, name in wrong):
        ahead, name = next(one for one in wrong if one[1].rpartition(":")[0] == host)
        what = f"the clock of {host} is {_span(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the server's"
        mend = verb_line("worker", "show", name)
        yield Finding("process-clock", "", what, mend, where=name, numbers={"ahead": ahead})


def _judge_policies(snapshot: Snapshot) -> Iterator[Finding]:
    """Judge programs that adopted the policy of a newer revision, and run for longer than a deployment takes."""
    limit = limit_of("policy-outdated")
    old = [
        one for one in snapshot.processes
        if (adopted := one.counters.get("topic.policy_adopted")) and not adopted.last_10_minutes
        and _age(snapshot, one.started_at) >= limit
    ]  # fmt: skip
    if not old:
        return
    topics = sorted({row for one in old for row in one.adopted})
    which = _some(f"of {topic!r} {declared}, and the store has {stored}" for topic, stored, declared in topics)
    what = f"{_count(len(old), 'process', '')} declare{'s'[: len(old) == 1]} an older revision of a policy"
    yield Finding(
        "policy-outdated", "", f"{what}: {which}" if which else what, verb_line("worker", "show", old[0].name),
        topics[0][0] if len(topics) == 1 else "", _some(one.name for one in old), numbers={"processes": len(old)},
    )  # fmt: skip


def _judge_versions(snapshot: Snapshot) -> Iterator[Finding]:
    """Judge programs of which processes with several versions of idemgate run for longer than a deployment takes."""
    limit = limit_of("versions-differ")
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in snapshot.processes:
        if _age(snapshot, one.started_at) >= limit:
            found[one.program][one.version] += 1
    for program, versions in found.items():
        if len(versions) > 1:
            what = f"{program} runs with idemgate {_some(sorted(versions))}"
            mend = verb_line("worker", "ls")
            yield Finding("versions-differ", "", what, mend, where=program, numbers=dict(versions))


# -- words ------------------------------------------------------------------------------------------------------------


def _age(snapshot: Snapshot, since: datetime) -> float:
    return (snapshot.taken_at - since).total_seconds()


def _due(topic: TopicSeen) -> int:
    return topic.stats.ready + topic.stats.waiting + topic.stats.blocked


def _count(n: int, noun: str, verb: str = "is") -> str:
    plural = noun if n == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    verb = "are" if verb and n != 1 else verb
    return f"{n:,} {plural} {verb}".rstrip()


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _some(names: Iterable[str]) -> str:
    """Return at most three names, and how many others there are."""
    found = [*names]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
