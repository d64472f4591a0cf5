"""Verbs of dead letters."""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator
from fractions import Fraction
from time import sleep
from typing import Any, Self

from idemgate.core.calls import Batch, run_plan
from idemgate.core.clock import monotonic
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.gate import Gate
from idemgate.operate.topics import find_topic
from idemgate.operate.values import export_payload, show_value
from idemgate.operate.verb import Facts, Given, Lines, Parameter, Verb
from idemgate.topics.dead_letters import (
    PAGE,
    DeadLetter,
    DeadTaken,
    build_filter,
    decode_dead_letter,
    group_ids,
    iterate_dead_letters,
    plan_move,
    select_letters,
)
from idemgate.topics.limits import rate_of
from idemgate.topics.topic import Topic

__all__ = ["DEAD_VERBS", "letter_facts"]

log: logging.Logger = logging.getLogger("idemgate.operate")
_RATE = "1000/1s"
"""The usual rate of a redrive: the calls take the server about a twentieth of its time."""
_SAMPLES = 3
_COUNTED = 1000
_FILTERS = ("key", "reason", "since", "until")


def list_dead(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return dead letters, newest first."""
    letters = find_topic(gate, given).dead.list(given["limit"] or 50, **_filters(given))
    return [letter_facts(letter, given["values"]) for letter in letters]


def export_dead(gate: Gate, given: Given) -> Iterator[dict[str, Any]]:
    """Yield all that is stored of each dead letter, as programs read it. It holds one page in memory."""
    calls, wanted = find_topic(gate, given).open(), build_filter(**_filters(given))
    for letter in iterate_dead_letters(calls, gate.context.link.run_all, wanted):
        times = {"first_at": letter.first_at, "last_at": letter.last_at}
        exported = export_payload(letter, gate.context.codec)
        yield letter_facts(letter, values=False) | times | exported | {"stored": b64encode(letter.stored).decode()}


def import_dead(gate: Gate, given: Given) -> Facts:
    """Store dead letters that `export_dead` returned."""
    topic = find_topic(gate, given)
    loaded = topic.dead.load(_read_letters(topic, given["file"]))
    return {"topic": given["topic"]} | loaded._asdict()


def _look_import(gate: Gate, given: Given) -> Facts:
    topic = find_topic(gate, given)
    found, policy = _read_letters(topic, given["file"]), topic.open().policy
    letters = [decode_dead_letter(0, b"", stored, policy.merge, gate.context.codec) for stored in found[:_SAMPLES]]
    samples = [
        {name: value for name, value in letter_facts(one, values=False).items() if name != "id"} for one in letters
    ]
    return {"topic": given["topic"], "letters": len(found), "samples": samples}


def _read_letters(topic: Topic, file: Lines) -> list[bytes]:
    """Return the stored bytes in each line. Raises InvalidArgument, which names the line."""
    found, calls = list[bytes](), topic.open()
    for number, line in enumerate(file.lines, 1):
        if not line.strip():
            continue
        try:
            stored = b64decode(json.loads(line)["stored"], validate=True)
            calls.check_stored(stored)
        except (ValueError, TypeError, LookupError, DecodeError) as error:
            fix = "Pass lines of `dead export` of a topic with the same merge policy"
            problem = error.why if isinstance(error, DecodeError) else f"{type(error).__name__}: {error}"
            raise InvalidArgument(f"line {number} of {file}", line, problem, fix) from None
        found.append(stored)
    return found


def redrive_dead(gate: Gate, given: Given) -> Facts:
    """Move dead letters back into their topic."""
    topic, selection, rate = find_topic(gate, given), _selection(given), _rate(given)
    ids, limit = selection["ids"], selection["limit"]
    chosen = select_letters(ids, build_filter(**_filters(given)), limit, min(PAGE, max(1, int(rate))))
    with _Pace(gate, given["topic"], float(rate)) as pace:
        facts = {"topic": given["topic"], "redriven": run_plan(plan_move(topic.open(), "redrive", chosen), pace.send)}
    return facts | ({"without_room": pace.stayed} if pace.stayed else {})


class _Pace:
    """Sends the calls of a plan that moves letters, at a rate, and logs how many it has moved: once a second, and at
    the end, also after an interruption."""

    def __init__(self, gate: Gate, topic: str, rate: float) -> None:
        self._send = gate.context.link.run_all
        self._topic = topic
        self._rate = rate
        self._began = self._logged = monotonic()
        self._taken = self._moved = 0
        self.stayed = 0
        """The letters for which the pending messages of their keys have no room."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log()

    def send(self, request: Batch[list[Any]]) -> list[Any]:
        if (pause := self._began + self._taken / self._rate - monotonic()) > 0:
            sleep(pause)
        answers = self._send(request)
        for answer in answers:
            if isinstance(answer, DeadTaken):
                self._taken += answer.taken + answer.stayed
                self._moved, self.stayed = self._moved + answer.moved_count, self.stayed + answer.stayed
        if monotonic() - self._logged >= 1:
            self._log()
        return answers

    def _log(self) -> None:
        self._logged = monotonic()
        facts = {"topic": self._topic, "redriven": self._moved}
        log.info("operate.redrive topic=%r redriven=%d", *facts.values(), extra=facts)


def _rate(given: Given) -> Fraction:
    return rate_of(given["rate"] or _RATE)


def _look_redrive(gate: Gate, given: Given) -> Facts:
    rate = _rate(given)  # raises for what is no rate
    return {**_look(gate, given), "a_second": float(rate)}


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
    samples = [letter_facts(letter, values=False) for letter in letters[:_SAMPLES]]
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


def letter_facts(letter: DeadLetter, values: bool) -> dict[str, Any]:
    """Return a dead letter as facts, with its payload only if `values` is true."""
    facts = {
        "id": letter.id, "key": letter.key, "died_at": letter.died_at, "attempts": letter.attempts,
        "triggers": letter.count, "reason": letter.reason,
    }  # fmt: skip
    return facts | ({"payload": show_value(letter, "payload")} if values else {})


_TOPIC = Parameter("topic", "the topic", required=True)
_SELECT = (
    Parameter("key", "only keys that match this shell pattern, such as order-*", "pattern"),
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
        "dead", "import", "store what `dead export` printed as dead letters again. It reads the whole file first. "
        "Letters that the topic has, by id, key and time of death, are skipped: not after the number of slots changed",
        import_dead, (_TOPIC, Parameter("file", "the file; - or none is the standard input", "lines", required=True)),
        _look_import,
    ),
    Verb(
        "dead", "redrive", "move dead letters back into their topic, due now. After an interruption, the same command "
        "goes on with the rest", redrive_dead,
        (_TOPIC, _IDS, *_SELECT, _LIMIT, _ALL, Parameter("rate", f"at most so many, such as 10/1m (default: {_RATE})")),
        _look_redrive,
    ),
    Verb(
        "dead", "rm", "delete dead letters", delete_dead, (_TOPIC, _IDS, *_SELECT, _LIMIT, _ALL), _look, loses=True,
    ),
)  # fmt: skip
