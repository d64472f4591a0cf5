"""Verbs of topics and their messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import Any, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from idemgate.audit.running import BURIED_BY_OPERATOR
from idemgate.core.calls import run_plan
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.operate.transfer import Transferred, keep_dead_letters, plan_messages, plan_transfer
from idemgate.operate.values import show_value
from idemgate.operate.verb import Facts, Given, Parameter, Verb, tell_change
from idemgate.topics.messages import Pause, Peek, Position, Stats, Trigger, pack_pause
from idemgate.topics.policy import check_slots
from idemgate.topics.registry import RegistryEntry, StoredTopic, list_entries, read_topics
from idemgate.topics.reshard import ReshardProgress
from idemgate.topics.topic import Topic

__all__ = ["GROUP_VERBS", "TOPIC_VERBS", "describe_condition", "find_topic", "message_rows"]

T = TypeVar("T")
log: logging.Logger = logging.getLogger("idemgate.operate")
_COUNTED = 1000


def find_topic(gate: Gate, given: Given) -> Topic:
    """Return the stored topic of this name. Raises InvalidArgument for an unknown one, instead of creating it."""
    return gate.topic(_find_entry(gate, given).name)


def _find_entry(gate: Gate, given: Given) -> RegistryEntry:
    known = {entry.name: entry for entry in gate.context.link.run(list_entries(gate.namespace, gate.context.clock))}
    name = given["topic"]
    if name not in known:
        there = ", ".join(map(one_line, known)) or "none"
        raise InvalidArgument("topic", name, "no such topic in the store", f"There are: {there}")
    return known[name]


def list_topics(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return all topics, or the active ones, with their numbers of messages."""
    return [_row(one) for one in gate.stored_topics(active=given["active"])]


def _row(topic: StoredTopic) -> dict[str, Any]:
    stats = topic.stats
    return {
        "topic": topic.name, "slots": topic.slots, "scheduled": stats.scheduled, "ready": stats.ready,
        "waiting": stats.waiting, "blocked": stats.blocked, "in_flight": stats.in_flight, "dead": stats.dead,
        "oldest_due": stats.oldest_due, "next_due": stats.next_due,
        "condition": describe_condition(topic.changing_to, stats.paused),
        "paused": stats.paused and asdict(stats.paused),
    }  # fmt: skip


def describe_condition(changing_to: int | None, paused: Pause | None) -> str:
    """Return in words that a topic is being changed or is paused, else ""."""
    if changing_to is not None:
        return f"changing to {changing_to} slots" if changing_to else "being deleted"
    return "paused" if paused else ""


def show_topic(gate: Gate, given: Given) -> Facts:
    """Return the numbers, the policy and the counters of a topic."""
    [topic] = gate.context.link.run_all(read_topics(gate.context, [_find_entry(gate, given)]))
    stats = topic.stats
    return _row(topic) | {
        "lateness": stats.lateness.total_seconds(), "sampled": stats.sampled or None,
        "oldest_blocked": stats.oldest_blocked and stats.oldest_blocked.group, "blocked_groups": _group_rows(stats),
        "policy": topic.policy.describe(), "counters": dict(stats.counters),
    }  # fmt: skip


def list_groups(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return the groups of a topic with the most messages that wait for their group, the largest first."""
    return _group_rows(find_topic(gate, given).stats())


def _group_rows(stats: Stats) -> list[dict[str, Any]]:
    return [{"group": one.group, "messages": one.count, "oldest_due": one.oldest_due} for one in stats.blocked_groups]


def pause_topic(gate: Gate, given: Given) -> Facts:
    """Stop all deliveries of a topic."""
    paused = find_topic(gate, given).pause(given["why"] or None)
    return {"topic": given["topic"]} | tell_change("paused", paused, "it was paused before: that pause stays")


def _look_pause(gate: Gate, given: Given) -> Facts:
    pack_pause(given.get("why") or None)  # raises for a reason that is too long
    return show_topic(gate, given)


def resume_topic(gate: Gate, given: Given) -> Facts:
    """End a pause."""
    return {"topic": given["topic"]} | tell_change("resumed", find_topic(gate, given).resume(), "it was not paused")


def flush_topic(gate: Gate, given: Given) -> Facts:
    """Make all pending messages of a topic due now, or those of a key."""
    topic = find_topic(gate, given)
    group = None if given["key"] is None else _group_of(gate, topic, given)
    return {"topic": given["topic"], "moved": topic.flush(given["key"], group=group)}


def _look_flush(gate: Gate, given: Given) -> Facts:
    return show_topic(gate, given) if given["key"] is None else _look_message(gate, given)


# -- messages ------------------------------------------------------------------------------------------------------


_MOST = 1000
"""The most messages of a page."""


def list_messages(gate: Gate, given: Given) -> Facts:
    """Return pending messages, and where the next page begins."""
    n = given["limit"] or 50
    if n > _MOST:
        raise InvalidArgument(
            "limit", n, "more than a page holds", f"Use at most {_MOST}, then --after for the next page"
        )
    calls = find_topic(gate, given).open()
    page = run_plan(plan_messages(calls, _position(given["after"]), n), gate.context.link.run_all)
    rows = [
        {
            "key": one.raw_key.decode(errors="backslashreplace"), "state": one.state, "due_at": one.due_at,
            "triggers": one.message.count, "attempts": one.message.attempts, "group": one.message.group or None,
            **({"payload": show_value(one.message, "payload")} if given["values"] else {}),
        }
        for one in page.messages
    ]  # fmt: skip
    after = page.next and f"{page.next.part}:{page.next.score!r}:{quote_from_bytes(page.next.member, safe='')}"
    state = "" if rows or after else "nothing is pending"
    return {"topic": given["topic"], "state": state, "messages": rows, "after": after}


def _position(cursor: str | None) -> Position:
    if cursor is None:
        return Position()
    try:
        part, score, member = cursor.split(":")
        found = Position(int(part), float(score), unquote_to_bytes(member))
        if found.part in (1, 2, 3, 4) and isfinite(found.score) and found.member:
            return found
    except ValueError:
        pass
    raise InvalidArgument("after", cursor, "not where a page ended", "Pass what `topic messages` printed as after")


def peek_message(gate: Gate, given: Given) -> Facts:
    """Return the messages of a key."""
    rows = message_rows(_find(gate, find_topic(gate, given), given), given["values"])
    return {"topic": given["topic"], "key": given["key"], "state": "" if rows else "absent", "messages": rows}


def message_rows(found: list[Peek], values: bool = False) -> list[dict[str, Any]]:
    """Return a row for each pending message and each delivery."""
    rows = list[dict[str, Any]]()
    for seen in found:
        for message, state in ((seen.in_flight, "in flight"), (seen.pending, "pending")):
            if message is None:
                continue
            runs = message is seen.in_flight
            row = {
                "state": state, "due_at": None if runs else seen.due_at,
                "lease_until": seen.lease_until if runs else None, "token": seen.token if runs else None,
                "triggers": message.count, "attempts": message.attempts, "group": message.group or None,
            }  # fmt: skip
            rows.append(row | ({"payload": show_value(message, "payload")} if values else {}))
    return rows


def _find(gate: Gate, topic: Topic, given: Given) -> list[Peek]:
    """Return what a topic holds of a key: in the given group, else in all groups."""
    found: list[Peek] = gate.context.link.run_all(topic.open().find(given["key"]))
    return [one for one in found if given.get("group") in (None, _group(one).decode(errors="backslashreplace"))]


def _group(seen: Peek) -> bytes:
    message = seen.pending or seen.in_flight
    return message.raw_group if message else b""


def _group_of(gate: Gate, topic: Topic, given: Given) -> bytes | str | None:
    """Return the group of the messages of a key. Raises InvalidArgument if there are several."""
    if given["group"] is not None:
        return str(given["group"])
    groups = {_group(seen) for seen in _find(gate, topic, given)}
    if len(groups) > 1:
        names = ", ".join(sorted(one_line(group.decode(errors="backslashreplace")) or "(none)" for group in groups))
        raise InvalidArgument("group", None, "the key has messages in several groups", f"Name one: {names}")
    return next(iter(groups), b"") or None


def trigger_message(gate: Gate, given: Given) -> Facts:
    """Send one trigger."""
    [receipt] = find_topic(gate, given).trigger_many([_trigger(given)])
    return {"topic": given["topic"], "key": given["key"], "status": receipt.status, "due_at": receipt.due_at}


def _trigger(given: Given) -> Trigger:
    names = ("priority", "group", "delay", "at", "version", "event_id")
    return Trigger(given["key"], given["payload"], **{name: given[name] for name in names})


def _look_trigger(gate: Gate, given: Given) -> Facts:
    topic = find_topic(gate, given)
    topic.open()
    topic.pack_trigger(_trigger(given))  # raises for what the topic would refuse
    return _look_message(gate, {**given, "group": None})


def cancel_message(gate: Gate, given: Given) -> Facts:
    """Cancel the message of a key."""
    topic = find_topic(gate, given)
    outcome = topic.cancel(given["key"], group=_group_of(gate, topic, given))
    return {"topic": given["topic"], "key": given["key"], "outcome": outcome}


def bury_message(gate: Gate, given: Given) -> Facts:
    """Move the pending message of a key to the dead letters."""
    topic, why = find_topic(gate, given), given["why"]
    reason = f"{BURIED_BY_OPERATOR}: {why}" if why else BURIED_BY_OPERATOR
    calls = keep_dead_letters(topic.open())
    outcome = gate.context.link.run(calls.bury(given["key"], _group_of(gate, topic, given), reason))
    return {"topic": given["topic"], "key": given["key"], "outcome": outcome}


def move_message(gate: Gate, given: Given) -> Facts:
    """Move the pending message of a key to another time."""
    topic = find_topic(gate, given)
    group = _group_of(gate, topic, given)
    outcome = topic.reschedule(given["key"], at=given["at"], delay=given["delay"], group=group)
    return {"topic": given["topic"], "key": given["key"], "outcome": outcome}


def _look_move(gate: Gate, given: Given) -> Facts:
    if (given["at"] is None) == (given["delay"] is None):
        raise InvalidArgument("at", given["at"], "not one time", "Give --at or --delay")
    return _look_message(gate, given)


def _look_message(gate: Gate, given: Given) -> Facts:
    topic = find_topic(gate, given)
    _group_of(gate, topic, given)
    return peek_message(gate, {**given, "values": False})


def show_version(gate: Gate, given: Given) -> Facts:
    """Return the newest version that a topic knows of a key."""
    stored = find_topic(gate, given).versions(given["key"], group=given["group"])
    facts = {"topic": given["topic"], "key": given["key"], "state": "" if stored else "no version is stored"}
    return facts | ({"version": stored.version, "until": stored.until} if stored else {})


def reset_version(gate: Gate, given: Given) -> Facts:
    """Forget the version of a key, so that its next trigger is accepted with any version."""
    reset = find_topic(gate, given).reset_version(given["key"], group=given["group"])
    facts = {"topic": given["topic"], "key": given["key"]}
    return facts | tell_change("reset", reset, "no version is stored")


# -- the whole topic --------------------------------------------------------------------------------------------------


def reshard_topic(gate: Gate, given: Given) -> Facts:
    """Change the number of slots of a topic, while programs use it."""
    done = find_topic(gate, given).reshard(given["slots"], _progress_logger(given["topic"]))
    return {"topic": given["topic"], "before": done.before, "slots": done.after, "moved": done.moved}


def _look_reshard(gate: Gate, given: Given) -> Facts:
    check_slots(find_topic(gate, given).open().policy, given["slots"])
    return show_topic(gate, given)


def _progress_logger(topic: str) -> Callable[[ReshardProgress], None]:
    """Return a callback that logs the progress of a change of slots, at most once a second."""

    def tell(progress: ReshardProgress) -> None:
        facts = {"topic": topic, "done": progress.done, "parts": progress.parts, "moved": progress.moved}
        log.info("operate.reshard topic=%r done=%d parts=%d moved=%d", *facts.values(), extra=facts)

    return _once_a_second(tell)


def _once_a_second(tell: Callable[[T], None]) -> Callable[[T], None]:
    """Return a callback that passes at most one call a second on."""
    told = monotonic()

    def tell_seldom(progress: T) -> None:
        nonlocal told
        if monotonic() - told >= 1:
            told = monotonic()
            tell(progress)

    return tell_seldom


def transfer_topic(gate: Gate, given: Given) -> Facts:
    """Move the pending messages of a topic to another one."""
    source, to = _find_both(gate, given)

    def tell(progress: Transferred) -> None:
        facts = {"topic": given["topic"], "to": given["to"], **progress._asdict()}
        log.info("operate.transfer topic=%r to=%r moved=%d dropped=%d", *facts.values(), extra=facts)

    reason = f"{BURIED_BY_OPERATOR}: topic transfer to {given['to']!r}"
    plan = plan_transfer(source.open(), to.open(), reason, _once_a_second(tell))
    done = run_plan(plan, gate.context.link.run_all)
    left = source.stats()
    full = len(source.dead.list(_COUNTED, reason=reason)) if left.dead else 0
    return {
        "topic": given["topic"], "to": given["to"], "moved": done.moved, "dropped": done.dropped,
        "left_pending": left.pending, "left_in_flight": left.in_flight,
    } | ({"without_room": full} if full else {})  # fmt: skip


def _look_transfer(gate: Gate, given: Given) -> Facts:
    source, _ = _find_both(gate, given)
    stats = source.stats()
    return {"topic": given["topic"], "to": given["to"], "pending": stats.pending, "in_flight": stats.in_flight}


def _find_both(gate: Gate, given: Given) -> tuple[Topic, Topic]:
    """Return both topics of a transfer. Raises InvalidArgument if they cannot hold the same messages."""
    source, to = find_topic(gate, given), find_topic(gate, {"topic": given["to"]})
    if given["to"] == given["topic"]:
        raise InvalidArgument("to", given["to"], "the same topic", "Name another one")
    policies = [topic.open().policy for topic in (source, to)]
    if policies[0].merge.spec != policies[1].merge.spec:
        before, after = (policy.describe()["merge"] for policy in policies)
        problem = f"it merges by {after}, and {given['topic']} by {before}"
        raise InvalidArgument("to", given["to"], problem, "Name a topic with the same merge policy")
    return source, to


def delete_topic(gate: Gate, given: Given) -> Facts:
    """Delete a topic from the store."""
    gone = find_topic(gate, given).delete(discard=given["discard"])
    numbers = {"discarded_pending": gone.pending, "discarded_in_flight": gone.in_flight, "discarded_dead": gone.dead}
    return {"topic": given["topic"], "deleted": True} | numbers


_TOPIC = Parameter("topic", "the topic", required=True)
_KEY = Parameter("key", "the key", required=True)
_GROUP = Parameter("group", "the group of the message (default: the only one in which the key has a message)")
_SENT_GROUP = Parameter("group", "the group that the triggers of the key named")
_AT = Parameter("at", "the time, such as 2026-12-24T18:00+01:00", "time")
_DELAY = Parameter("delay", "the time from now, such as 5m", "seconds")
TOPIC_VERBS = (
    Verb(
        "topic", "ls", "list the topics that the store holds", list_topics,
        (Parameter("active", "only those that hold a message or dead letter, are paused or change", "flag"),),
    ),
    Verb("topic", "show", "show the numbers, the policy and the counters of a topic", show_topic, (_TOPIC,)),
    Verb("topic", "pause", "stop all deliveries of a topic", pause_topic, (_TOPIC,), _look_pause),
    Verb("topic", "resume", "end the pause of a topic", resume_topic, (_TOPIC,), show_topic),
    Verb(
        "topic", "flush", "make pending messages due now: all of a topic, or that of one key", flush_topic,
        (_TOPIC, Parameter("key", "only the message of this key"), _GROUP), _look_flush,
    ),
    Verb(
        "topic", "messages", "list the pending messages of a topic: those that are scheduled or ready by their times, "
        "then those that wait for their group or for a delivery of their key", list_messages,
        (
            _TOPIC, Parameter("limit", f"the most messages, up to {_MOST} (default: 50)", "count"),
            Parameter("after", "go on where a page ended: what it shows as after"),
            Parameter("values", "also show payloads", "flag"),
        ),
    ),
    Verb(
        "topic", "transfer", "move the pending messages of a topic to another one, after its handler was renamed. Each "
        "keeps its time, payload, attempts and version. Deliveries and the messages behind them are left. After an "
        "interruption, the same command goes on with the rest", transfer_topic,
        (
            _TOPIC,
            Parameter("to", "the topic that gets the messages, with the same merge policy", required=True),
        ), _look_transfer,
    ),
    Verb(
        "topic", "peek", "show the messages of a key, in all groups", peek_message,
        (_TOPIC, _KEY, Parameter("values", "also show payloads", "flag")),
    ),
    Verb(
        "topic", "trigger", "send one trigger", trigger_message,
        (
            _TOPIC, _KEY, Parameter("payload", "the payload, as JSON", "json"), _DELAY, _AT,
            Parameter("group", "the group"), Parameter("priority", "the priority", "number"),
            Parameter("version", "the version", "number"), Parameter("event_id", "the id of the event"),
        ), _look_trigger,
    ),
    Verb(
        "topic", "cancel", "cancel the message of a key", cancel_message, (_TOPIC, _KEY, _GROUP), _look_message,
        loses=True,
    ),
    Verb(
        "topic", "bury", "move the pending message of a key to the dead letters; a delivery that runs is not touched",
        bury_message, (_TOPIC, _KEY, _GROUP), _look_message,
    ),
    Verb(
        "topic", "move", "move the pending message of a key to another time", move_message,
        (_TOPIC, _KEY, _AT, _DELAY, _GROUP), _look_move,
    ),
    Verb(
        "topic", "versions", "show the newest version of a key; triggers with a lower one are dropped", show_version,
        (_TOPIC, _KEY, _SENT_GROUP),
    ),
    Verb(
        "topic", "reset-version", "forget the version of a key, such as one of a wrong clock", reset_version,
        (_TOPIC, _KEY, _SENT_GROUP), show_version,
    ),
    Verb(
        "topic", "reshard", "change the number of slots while programs use the topic; repeat it after an interruption",
        reshard_topic, (_TOPIC, Parameter("slots", "the number of slots, a power of two", "count", required=True)),
        _look_reshard,
    ),
    Verb(
        "topic", "delete", "delete a topic; refused while it holds messages or dead letters, unless --discard is given",
        delete_topic, (_TOPIC, Parameter("discard", "also delete its messages and dead letters", "flag")), show_topic,
        loses=True,
    ),
)  # fmt: skip
GROUP_VERBS = (
    Verb(
        "group", "ls", "list the groups of a topic with the most due messages that wait for their group, at most five",
        list_groups, (_TOPIC,),
    ),
)  # fmt: skip
