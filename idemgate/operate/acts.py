"""The list of acts: who asked for which change, when and why. The store keeps the newest ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from idemgate.core import keys
from idemgate.core.calls import Call, call, new_id, stamp
from idemgate.core.history import KEPT_ACTS, Act, Subject, decode_act, pack_act, stored_key
from idemgate.core.process import operated_by
from idemgate.core.text import one_line
from idemgate.gate import Gate
from idemgate.operate.verb import Answer, Given, Verb

__all__ = ["acts_call", "describe_act", "list_acts", "perform", "record_call"]

log: logging.Logger = logging.getLogger("idemgate.operate")
_REDACTED = {"key": "key", "group": "key", "event_id": "key", "reason": "error"}
"""The parameters of changes that the gate's `redact` changes in the list of acts, and the kind of each."""
_WILDCARDS = "*?["


def perform(gate: Gate, verb: Verb, given: Given, *, who: str, why: str = "") -> Answer:
    """Run a verb and return its answer. A change is recorded in the list of acts first, so that none is missing there.

    Args:
        gate: a gate of the namespace.
        verb: the verb.
        given: the values of its parameters.
        who: the person or program that asks.
        why: the reason, if one was given. The verb finds it as "why" among its values.

    Raises:
        InvalidArgument: a value is invalid.
        StoreError: the store failed. The act may stand in the list all the same.
    """
    if not verb.changes:
        return verb.run(gate, given)
    what, given = describe_act(verb, given, gate.context.redact_text), {**given, "why": why}
    if verb.find_scope is not None:
        given = {**given, "scope": verb.find_scope(gate, given)}
    assert verb.look is not None
    verb.look(gate, given)  # what cannot be done is refused before it stands in the list
    gate.context.link.run(record_call(gate, who, what, why, _subject(gate, verb, given)))
    facts = {"who": who, "what": what, "why": why}
    log.info("operate.act who=%r what=%r why=%r", *map(one_line, facts.values()), extra=facts)
    with operated_by(who):
        return verb.run(gate, given)


def describe_act(verb: Verb, given: Given, show: Callable[[str, str], str] = lambda _, text: text) -> str:
    """Return the command of an act as a shell reads it, without values that hold payloads or results.

    `show` returns what is shown of a text of a kind of `Redact`: "key" or "error".
    """
    shown = dict(given)
    for parameter in verb.parameters:
        if (value := given.get(parameter.name)) is None:
            continue
        if parameter.kind == "json":
            shown[parameter.name] = "..."
        if parameter.name in _REDACTED:
            shown[parameter.name] = show(_REDACTED[parameter.name], str(value))
    return verb.write_command(shown).removeprefix("idemgate ")


def _subject(gate: Gate, verb: Verb, given: Given) -> Subject:
    """Return what an act is about, by the names of its parameters. A pattern with wildcards is about no single key."""
    key, kinds = given.get("key"), {one.name: one.kind for one in verb.parameters}
    if key is None or (kinds["key"] == "pattern" and any(char in key for char in _WILDCARDS)):
        name = b""
    else:
        name = stored_key(keys.raw(key), hidden=gate.context.redact is not None)
    return Subject(given.get("topic") or "", given.get("scope") or "", name)


def list_acts(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return the newest acts as facts: at, who, what and why. Raises DecodeError for damaged data."""
    acts = gate.context.link.run(acts_call(gate, given["limit"] or 50))
    return [{"at": act.at, "who": act.who, "what": act.what, "why": act.why} for act in acts]


def acts_call(gate: Gate, n: int) -> Call[list[Act]]:
    """Build the call that returns the newest `n` acts."""

    def read(reply: list[Any]) -> list[Act]:
        return list(map(decode_act, reply[2:]))

    return call("operate/acts", (keys.acts(gate.namespace),), (stamp(gate.context.clock), n), read)


def record_call(gate: Gate, who: str, what: str, why: str, subject: Subject | None = None) -> Call[None]:
    """Build the call that records an act."""
    args = (stamp(gate.context.clock), new_id(), pack_act(who, what, why, subject or Subject()), KEPT_ACTS)
    return call("operate/record", (keys.acts(gate.namespace),), args, lambda _: None)
