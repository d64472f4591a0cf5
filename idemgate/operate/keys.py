"""Verbs of guarded keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from idemgate.core.calls import PROCESS_BYTES, Batch, Call, call, run_plan, stamp, text
from idemgate.core.history import KEPT_ACTS
from idemgate.core.keys import raw, record, scopes
from idemgate.core.text import one_line
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims, Record
from idemgate.guard.manage import Resolution
from idemgate.history.calls import ask_names, find_guard_history, find_message_history
from idemgate.operate.acts import acts_call
from idemgate.operate.dead import letter_facts
from idemgate.operate.topics import message_rows
from idemgate.operate.values import show_value
from idemgate.operate.verb import Facts, Given, Parameter, Verb, tell_change
from idemgate.topics.registry import find_dead_letters, find_messages

__all__ = ["KEY_VERBS", "scopes_call"]

_PROCESS = re.compile(r".*, pid (\d+) on (.+)", re.DOTALL)
"""The name of a process (`process_name`). `worker show` takes its host and pid."""
_DEFAULTS = ("claim", "first")
"""The scopes of `gate.claim` and `gate.first`, which no program registers."""


def find_records(gate: Gate, key: str, scope: str | None) -> dict[str, Record]:
    """Return the records of a key by scope, also absent ones: of this scope, or of all that the store knows."""
    link = gate.context.link
    wanted = [scope] if scope is not None else sorted({*link.run(scopes_call(gate)), *_DEFAULTS})
    claims = Claims(gate.namespace, gate.context.clock)
    requests = [claims.inspect((record(gate.namespace, one, key),)) for one in wanted]
    found: list[Record] = link.run_all(Batch(requests, list))
    return dict(zip(wanted, found, strict=True))


def scopes_call(gate: Gate) -> Call[list[str]]:
    """Build the call that returns the scopes that programs have registered."""
    args = (stamp(gate.context.clock),)
    return call("guard/scopes", (scopes(gate.namespace),), args, lambda reply: list(map(text, reply[2:])))


def _scope_of(gate: Gate, given: Given) -> str:
    """Return the scope in which a key is to be changed: the given one, or the only one that has it."""
    if given["scope"] is not None:
        return str(given["scope"])
    records = find_records(gate, given["key"], None)
    found = [scope for scope, entry in records.items() if entry.state != "absent"]
    if len(found) == 1:
        return found[0]
    if found:
        fix = f"Name one: {', '.join(map(one_line, found))}"
        raise InvalidArgument("scope", None, "several scopes have this key", fix)
    problem = f"not found in the scopes that the store knows ({', '.join(map(one_line, records))})"
    raise InvalidArgument("key", given["key"], problem, "Name another scope with --scope")


def show_key(gate: Gate, given: Given) -> Facts:
    """Return what is stored for a key: a row for each scope that has it, and one for each message of a topic.

    Its timeline follows, the newest first. Equal rows in a row are one, with their number as `times` and the time of
    the first as `from`. `decision` is the last decision in a sentence. Of a key without any trace, `no_trace_since` is
    the time from which there would be one.
    """
    key, values, context = given["key"], given.get("values", False), gate.context
    records = {**find_records(gate, key, given["scope"])}
    timeline, since = _timeline(gate, key, given["scope"], list(records))
    owners = [entry.owner for entry in records.values() if entry.owner]
    names = run_plan(
        ask_names(context, [_id(one) for one in [*owners, *(row["by"] for row in timeline)]]), context.link.run_all
    )
    timeline = [row | {"by": names.get(row["by"], row["by"])} for row in timeline]
    found = [
        _facts(scope, entry, names.get(_id(entry.owner), ""), values)
        for scope, entry in records.items() if entry.state != "absent"
    ]  # fmt: skip
    topics = find_messages(context, key) if given["scope"] is None else {}
    messages = [{"topic": topic} | row for topic, seen in topics.items() for row in message_rows(seen, values)]
    buried = [row["of"] for row in timeline if row["what"] == "buried"]
    dead = find_dead_letters(context, key, buried) if given["scope"] is None else {}
    state = "" if found or messages else "dead letter" if dead else "absent"
    return {
        "key": key, "state": state, "decision": _last_decision(timeline),
        "scopes_searched": list(records), "topics_searched": list(topics),
        "no_trace_since": since if state == "absent" and not timeline else None,
        "ran_twice": "; ".join(_ran_twice(timeline)), "records": found, "messages": messages,
        "dead_letters": [{"topic": topic} | letter_facts(one, values) for topic, seen in dead.items() for one in seen],
        "timeline": _join_equal(timeline),
    }  # fmt: skip


_DECISIONS = {
    "cancelled": "cancelled", "cancel_asked": "asked to stop", "forgotten": "forgotten",
    "resolved_done": "resolved as done", "resolved_again": "resolved to run again", "buried": "buried",
    "redriven": "redriven", "deleted": "deleted as a dead letter",
}  # fmt: skip
"""The transitions that somebody decided, in words."""


def _last_decision(timeline: Sequence[Mapping[str, Any]]) -> str:
    """Return what was decided last, when, by whom and why, or "". A timeline has the oldest first."""
    for row in reversed(timeline):
        if row["what"] in _DECISIONS:
            said = [
                act["why"] for act in timeline
                if act["why"] and " " in act["what"] and act["at"] <= row["at"]
                and (act["of"], act["by"]) == (row["of"], row["by"])
            ]  # fmt: skip
            why = row["why"] or (said[-1] if said else "")
            by = f" by {row['by']}" if row["by"] else ""
            return f"{_DECISIONS[row['what']]} at {row['at']:%Y-%m-%d %H:%M:%S}Z{by}{why and f': {why}'}"
    return ""


def _join_equal(timeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a timeline with the newest first, and rows that are equal but for their times and triggers joined."""
    found = list[dict[str, Any]]()
    for row in reversed(timeline):
        if found and all(row[name] == found[-1][name] for name in _SAME):
            found[-1] |= {"times": (found[-1]["times"] or 1) + 1, "from": row["at"]}
        else:
            found.append({"at": row["at"], "times": None, "from": None} | row)
    return found


_SAME = ("of", "what", "attempts", "token", "by", "why")


def _id(owner: str) -> str:
    """Return the part of an owner's id that names its process in histories."""
    return owner[: 2 * PROCESS_BYTES]


def _ran_twice(timeline: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a timeline tells of work that ran twice: an owner ended it after another run had begun."""
    for lost in timeline:
        if lost["what"] != "lost":
            continue
        for one in timeline:
            again = one["token"] == lost["token"] if one["what"] == "lapsed" else one["what"] == "taken_over"
            if again and one["of"] == lost["of"]:
                yield f"in {lost['of']}: {lost['by']} ended it after its lease had ended, and {one['by']} ran it again"
                break


def _timeline(
    gate: Gate, key: str, scope: str | None, scopes: list[str]
) -> tuple[list[dict[str, Any]], datetime | None]:
    """Return what happened to a key, the oldest first, and the time from which nothing is missing."""
    found = list(run_plan(find_guard_history(gate.context, key, scopes), gate.context.link.run_all).items())
    if scope is None:
        found += find_message_history(gate.context, key).items()
    rows = _acts(gate, key, scope)
    rows += [
        {
            "at": one.at, "of": of, "what": one.what, "attempts": one.attempts or None,
            "triggers": one.triggers or None, "token": one.token, "by": one.by, "why": one.error or None,
        }
        for of, history in found for one in reversed(history.transitions)
    ]  # fmt: skip
    since = max((history.since for _, history in found), default=None)
    return sorted(rows, key=lambda row: row["at"]), since


def _acts(gate: Gate, key: str, scope: str | None) -> list[dict[str, Any]]:
    """Return the acts of operators that are about a key, as rows of its timeline."""
    raw_key = raw(key)
    return [
        {
            "at": act.at, "of": act.subject.topic or act.subject.scope, "what": act.what, "attempts": None,
            "triggers": None, "token": None, "by": act.who, "why": act.why or None,
        }
        for act in gate.context.link.run(acts_call(gate, KEPT_ACTS)) if act.subject.is_about(raw_key, scope)
    ]  # fmt: skip


def _facts(scope: str, entry: Record, process: str, values: bool) -> dict[str, Any]:
    """Return a record as facts. `process` is the name of its owner's process as histories have it, or ""."""
    named = _PROCESS.fullmatch(process)
    facts = {
        "scope": scope, "state": entry.state, "since": entry.since, "attempts": entry.attempts,
        "taken_over": entry.taken_over, "token": entry.token, "owner": entry.owner or None,
        "process": named and f"{named[2]}:{named[1]}",
        "lease_left": entry.lease_left, "retention_left": entry.retention_left, "unstored": entry.unstored_reason,
    }  # fmt: skip
    if values:
        facts |= {"value": show_value(entry, "value"), "checkpoint": show_value(entry, "recovered")}
    return facts


def _look(gate: Gate, given: Given) -> Facts:
    scope = _scope_of(gate, given)
    return show_key(gate, {**given, "scope": scope})


def forget_key(gate: Gate, given: Given) -> Facts:
    """Delete the record of a key, so that it may run again."""
    scope = _scope_of(gate, given)
    forgotten = gate.forget(given["key"], scope=scope, force=given["force"])
    return {"scope": scope} | tell_change("forgotten", forgotten, "there is no record")


def resolve_key(gate: Gate, given: Given) -> Facts:
    """Decide about a held key."""
    scope = _scope_of(gate, given)
    done, retention = given["done"], given["retention"]
    resolved = gate.resolve(given["key"], scope=scope, done=done, result=given["result"], retention=retention)
    return {"scope": scope} | tell_change("resolved", resolved, "the key waits for no decision")


def _look_resolve(gate: Gate, given: Given) -> Facts:
    if given["done"] == given["again"]:
        raise InvalidArgument("done", given["done"], "not one decision", "Give either --done or --again")
    scope, done = _scope_of(gate, given), given["done"]
    resolution = Resolution(gate.context, given["key"], scope, done, given["result"], given["retention"])
    if resolution.retention is None:  # raise for a scope that the store does not know
        resolution.set_retention(gate.context.link.run(resolution.ask_retention()))
    return show_key(gate, {**given, "scope": scope})


def cancel_key(gate: Gate, given: Given) -> Facts:
    """Ask the owner of a key to stop."""
    scope = _scope_of(gate, given)
    asked = gate.cancel(given["key"], scope=scope)
    return {"scope": scope} | tell_change("asked", asked, "no owner has a live lease")


def trace_key(gate: Gate, given: Given) -> Facts:
    """Return what became of the triggers with an event id: a row for each delivery, or one without deliveries."""
    traces = gate.trace(given["event"], topic=given["topic"], key=given["key"])
    since = max(traces.since.values(), default=None)
    return {
        "event": given["event"], "state": "" if traces.found else "no trace", "topics_searched": list(traces.since),
        "no_trace_since": None if traces.found else since, "topics_without_history": list(traces.untraced),
        "triggers": [
            {"at": one.at, "topic": one.topic, "key": one.key, "status": one.status, "by": one.by, "ended": one.outcome}
            for one in traces.found
        ],
        "deliveries": [
            {
                "at": taken.at, "topic": one.topic, "key": one.key, "attempt": taken.attempt, "token": taken.token,
                "by": taken.by, "ended_at": taken.ended_at, "outcome": ", ".join(taken.outcomes) or None,
            }
            for one in traces.found for taken in one.deliveries
        ],
    }  # fmt: skip


_KEY = Parameter("key", "the key", required=True)
_SCOPE = Parameter("scope", "the scope of the key (default: the only one that has it)")
KEY_VERBS = (
    Verb(
        "key", "show", "show what is stored for a key: its records in all scopes, its messages in all topics, and its "
        "dead letters among the newest 200 of a slot, in at most 20 slots",
        show_key,
        (
            _KEY, Parameter("scope", "only the record in this scope"),
            Parameter("values", "also show results, checkpoints and payloads", "flag"),
        ),
        tells_past=True,
    ),
    Verb(
        "key", "forget", "delete the record of a key: it may run again", forget_key,
        (_KEY, _SCOPE, Parameter("force", "also while its owner has a lease", "flag")), _look, loses=True,
        find_scope=_scope_of,
    ),
    Verb(
        "key", "resolve", "decide about a key whose owner lost its lease", resolve_key,
        (
            _KEY, _SCOPE, Parameter("done", "its work is done: it does not run again", "flag", choice="decision"),
            Parameter("again", "its work is not done: it may run again", "flag", choice="decision"),
            Parameter("result", "the result that duplicates get, as JSON", "json"),
            Parameter("retention", "how long it stays done (default: the longest retention of its scope)", "seconds"),
        ), _look_resolve, find_scope=_scope_of,
    ),
    Verb(
        "key", "trace", "show which deliveries took an event, by topics that keep all of their history", trace_key,
        (
            Parameter("event", "the event id of a trigger", required=True),
            Parameter("topic", "only in this topic"), Parameter("key", "only triggers of this key"),
        ),
    ),
    Verb(
        "key", "cancel", "ask the owner of a key to stop", cancel_key, (_KEY, _SCOPE), _look, find_scope=_scope_of,
    ),
)  # fmt: skip
