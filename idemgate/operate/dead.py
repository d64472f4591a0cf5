"""Verbs of dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.operate.topics import find_topic
from idemgate.operate.values import export_payload, show_value
from idemgate.operate.verb import Facts, Given, Parameter, Verb
from idemgate.topics.dead_letters import DeadLetter, build_filter, group_ids, iterate_dead_letters

__all__ = ["DEAD_VERBS"]

_SAMPLES = 3
_COUNTED = 1000
_FILTERS = ("key", "reason", "since", "until")


def list_dead(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return dead letters, newest first."""
    letters = find_topic(gate, given).dead.list(given["limit"] or 50, **_filters(given))
    return [_facts(letter, given["values"]) for letter in letters]


def export_dead(gate: Gate, given: Given) -> Iterator[dict[str, Any]]:
    """Yield all that is stored of each dead letter, as programs read it. It holds one page in memory."""
    calls, wanted = find_topic(gate, given).open(), build_filter(**_filters(given))
    for letter in iterate_dead_letters(calls, gate.context.link.run_all, wanted):
        times = {"first_at": letter.first_at, "last_at": letter.last_at}
        yield _facts(letter, values=False) | times | export_payload(letter, gate.context.codec)


def redrive_dead(gate: Gate, given: Given) -> Facts:
    """Move dead letters back into their topic."""
    topic, selection = find_topic(gate, given), _selection(given)
    return {"topic": given["topic"], "redriven": topic.dead.redrive(**selection)}


def delete_dead(gate: Gate, given: Given) -> Facts:
    """Delete dead letters."""
    topic, selection = find_topic(gate, given), _selection(given)
    return {"topic": given["topic"], "deleted": topic.dead.delete(**selection)}


def _look(gate: Gate, given: Given) -> Facts:
    """Return how many letters are selected, and some of them."""
    topic, selection = find_topic(gate, given), _selection(given)
    if selection["ids"] is not None:
        group_ids(selection["ids"], topic.open().policy.slots)  # raises for what is no id
        return {"topic": given["topic"], "selected": len(selection["ids"]), "ids": ", ".join(selection["ids"])}
    letters = topic.dead.list(selection["limit"] or _COUNTED, **_filters(given))
    more = "" if selection["limit"] or len(letters) < _COUNTED else " or more"
    samples = [_facts(letter, values=False) for letter in letters[:_SAMPLES]]
    return {"topic": given["topic"], "selected": f"{len(letters)}{more}", "samples": samples}


def _selection(given: Given) -> dict[str, Any]:
    """Return the arguments of `redrive` and `delete`. Raises InvalidArgument if they select nothing or twice."""
    filters = _filters(given)
    named, narrowed = bool(given["ids"]), any(one is not None for one in filters.values())
    if named + narrowed + given["all"] != 1 or (named and given["limit"]):
        fix = (
            f"Name ids, or give some of {', '.join('--' + name for name in _FILTERS)}, or --all; --limit is not for ids"
        )
        raise InvalidArgument("ids", given["ids"], "not one selection of dead letters", fix)
    return {"ids": given["ids"] or None, "limit": given["limit"], **filters}


def _filters(given: Given) -> dict[str, Any]:
    return {name: given[name] for name in _FILTERS}


def _facts(letter: DeadLetter, values: bool) -> dict[str, Any]:
    facts = {
        "id": letter.id, "key": letter.key, "died_at": letter.died_at, "attempts": letter.attempts,
        "triggers": letter.count, "reason": letter.reason,
    }  # fmt: skip
    return facts | ({"payload": show_value(letter, "payload")} if values else {})


_TOPIC = Parameter("topic", "the topic", required=True)
_SELECT = (
    Parameter("key", "only keys that match this shell pattern, such as order-*"),
    Parameter("reason", "only letters whose reason contains this text"),
    Parameter("since", "only letters that died then or later, such as 2026-12-24T18:00Z", "time"),
    Parameter("until", "only letters that died before", "time"),
)
_IDS = Parameter("ids", "ids of dead letters, as `dead ls` prints them", "texts", required=True)
_ALL = Parameter("all", "all dead letters of the topic", "flag")
_LIMIT = Parameter("limit", "the newest N only", "count")
DEAD_VERBS = (
    Verb(
        "dead", "ls", "list the dead letters of a topic, newest first", list_dead,
        (_TOPIC, *_SELECT, Parameter("limit", "the most letters (default: 50)", "count"),
         Parameter("values", "also show payloads", "flag")),
    ),
    Verb(
        "dead", "export", "print all dead letters that match, one JSON object a line, each slot newest first",
        export_dead, (_TOPIC, *_SELECT),
    ),
    Verb(
        "dead", "redrive", "move dead letters back into their topic, due now", redrive_dead,
        (_TOPIC, _IDS, *_SELECT, _LIMIT, _ALL), _look,
    ),
    Verb(
        "dead", "rm", "delete dead letters", delete_dead, (_TOPIC, _IDS, *_SELECT, _LIMIT, _ALL), _look, loses=True,
    ),
)  # fmt: skip
