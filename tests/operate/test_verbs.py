"""Each verb of the table: what it does to a store, what it leaves in the list of acts, and who may run it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from idemgate import Gate, Trigger, append
from idemgate.cli import command_line
from idemgate.cli.verbs import who_runs
from idemgate.core import keys
from idemgate.core.calls import process_bytes
from idemgate.core.codec.decoding import unpack
from idemgate.core.keys import slot_of
from idemgate.core.process import process_name
from idemgate.guard.claim_calls import register_retention
from idemgate.operate.acts import acts_call, describe_act, perform, record_call
from idemgate.operate.arguments import parse_given, read_command
from idemgate.operate.nouns import NOUNS
from idemgate.operate.table import VERBS
from idemgate.operate.verb import Verb
from idemgate.presence.calls import beat
from idemgate.testing import Clock
from idemgate.topics.merge import pack
from idemgate.topics.registry import find_messages
from tests.for_each import for_each
from tests.messages import pack_message
from tests.operate.conftest import Command
from tests.waiting import wait_until

pytestmark = pytest.mark.one_in(5)

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A command that changes something, and what it changes."""

    words: tuple[str, ...]
    answer: dict[str, Any]
    effect: Callable[[Gate], bool]


def case(words: str, effect: Callable[[Gate], Any], **answer: Any) -> Case:
    return Case(tuple(words.split()), answer, effect)


def pending(gate: Gate, key: str, group: str | None = None) -> Any:
    return gate.topic("jobs").peek(key, group=group).pending


def dead(gate: Gate, key: str) -> Any:
    return gate.topic("jobs").dead.list(key=key)[0]


def stats(gate: Gate) -> Any:
    return gate.topic("jobs").stats()


CHANGES = [
    case("key forget done", lambda gate: gate.inspect("done", scope="first").state == "absent", forgotten=True),
    case(
        "key resolve held --done --result 7 --retention 1h", lambda gate: gate.inspect("held").value == 7, resolved=True
    ),
    case("key resolve held --again", lambda gate: gate.claim("held").state == "started", resolved=True),
    case("key cancel runs", lambda gate: gate.inspect("runs").state == "in_progress", asked=True),
    case(
        "scope move first marks",
        lambda gate: [gate.inspect("done", scope=one).state for one in ("first", "marks")] == ["absent", "done"],
        moved=2,
        kept=0,
    ),
    case("topic pause jobs", lambda gate: stats(gate).paused, paused=True),
    case("topic pause jobs", lambda gate: stats(gate).paused.reason == "a reason", paused=True),
    case("topic resume jobs", lambda gate: not stats(gate).paused, resumed=False, state="it was not paused"),
    case("topic flush jobs", lambda gate: stats(gate).ready == 2, moved=2),
    case("topic flush jobs --key grouped", lambda gate: stats(gate).ready == 1, moved=1),
    case(
        'topic trigger jobs new --payload {"n":9} --delay 1h --event-id first',
        lambda gate: pending(gate, "new").payload == {"n": 9},
        status="scheduled",
    ),
    case("topic cancel jobs grouped", lambda gate: pending(gate, "grouped", "g") is None, outcome="cancelled"),
    case(
        "topic bury jobs waits",
        lambda gate: dead(gate, "waits").reason == "buried by an operator: a reason",
        outcome="buried",
    ),
    case(
        "topic move jobs waits --at 2099-01-01T00:00Z",
        lambda gate: gate.topic("jobs").peek("waits").due_at.year == 2099,
        outcome="rescheduled",
    ),
    case(
        "topic transfer jobs empty", lambda gate: gate.topic("empty").stats().scheduled == 2, moved=2, left_in_flight=1
    ),
    case("topic reset-version jobs waits", lambda gate: gate.topic("jobs").versions("waits") is None, reset=True),
    case("topic reshard jobs 4", lambda gate: gate.stored_topics()[1].slots == 4, before=1, slots=4),
    case("topic delete empty", lambda gate: [one.name for one in gate.stored_topics()] == ["jobs"], deleted=True),
    case("topic delete jobs --discard", lambda gate: len(gate.stored_topics()) == 1, discarded_dead=2),
    case("dead redrive jobs --key bad", lambda gate: pending(gate, "bad").payload == {"n": 1}, redriven=1),
    case("dead import jobs letters", lambda gate: dead(gate, "gone").payload == {"n": 0}, added=1, present=0),
    case("dead rm jobs --all", lambda gate: stats(gate).dead == 0, deleted=2),
    case("dead rm jobs --all --limit 1", lambda gate: stats(gate).dead == 1, deleted=1),
]
READS = {
    "key show done": {"key": "done", "state": ""},
    "key show runs --values": {"key": "runs"},
    "key trace first": {"event": "first", "state": "no trace", "topics_without_history": ["empty", "jobs"]},
    "topic ls": 2,
    "topic ls --active": 1,
    "topic show jobs": {"topic": "jobs", "scheduled": 2, "in_flight": 1, "dead": 2},
    "topic messages jobs --values": {"topic": "jobs", "after": None},
    "topic peek jobs waits --values": {"key": "waits", "state": ""},
    "topic versions jobs waits": {"version": 7},
    "group ls jobs": 0,
    "dead ls jobs --reason ValueError --limit 9": 2,
    "act ls": 0,
    "worker ls": {"running": []},
}
"""Commands that only read, and a part of the JSON: facts, or the number of rows."""
HELD = ("held", "ls")
SCANNING = {("scope", "move"): ("auditor",)}
"""Changes that SCAN, and the role that they need beside `operator`."""


def words_of(parts: tuple[str, ...]) -> list[str]:
    """Add `--yes` where a verb asks."""
    (verb,) = [one for one in VERBS if (one.noun, one.name) == parts[:2]]
    return [*parts, "--yes"] if verb.loses else [*parts]


def acts(gate: Gate) -> list[dict[str, Any]]:
    return [act._asdict() for act in gate.context.link.run(acts_call(gate, 1000))]


# -- what happened to a key -------------------------------------------------------------------------------------------


def timeline(command: Command, *words: str) -> list[tuple[str, str, str | None]]:
    """Return what `key show` prints of a key: each transition, its topic or scope, and the reason, the oldest first."""
    facts = json.loads(command("key", "show", *words, "--json").out)
    assert facts["no_trace_since"] is None or not facts["timeline"]
    return [(row["what"], row["of"], row["why"]) for row in reversed(facts["timeline"])]


def test_a_key_that_is_gone_has_a_timeline(filled: Gate, command: Command) -> None:
    # Given a message that an operator cancelled and a key that one decided about
    assert command("topic", "cancel", "jobs", "grouped", "--yes", "--why", "the customer called").code == 0
    assert command("key", "resolve", "held", "--done", "--retention", "1h").code == 0
    # Then the timeline has what happened, who did it and why
    assert timeline(command, "grouped") == [
        ("topic cancel jobs grouped", "jobs", "the customer called"), ("cancelled", "jobs", None),
    ]  # fmt: skip
    assert [what for what, _, _ in timeline(command, "held")] == [
        "key resolve held --done --retention 3600.0", "resolved_done",
    ]  # fmt: skip
    assert timeline(command, "held", "--scope", "first") == []
    # And what one step does is in its order
    filled.topic("jobs").trigger("runs", 2)
    filled.topic("jobs").cancel("runs")
    assert timeline(command, "runs") == [("cancelled", "jobs", None), ("cancel_asked", "jobs", None)]
    # And of a dead letter
    assert timeline(command, "gone") == [("buried", "jobs", None), ("deleted", "jobs", None)]
    shown = command("key", "show", "gone").out
    assert "absent" in shown
    assert re.search(r"^decision +deleted as a dead letter at 20\S+ \S+Z", shown, re.MULTILINE)
    decision = json.loads(command("key", "show", "held", "--json").out)["decision"]
    assert re.fullmatch(rf"resolved as done at 20\S+ \S+Z by {re.escape(who_runs())}", decision)
    decision = json.loads(command("key", "show", "grouped", "--json").out)["decision"]
    assert decision.endswith(f"Z by {who_runs()}: the customer called")
    assert "no trace since" not in shown


def test_equal_transitions_in_a_row_are_one_row(gate: Gate, command: Command) -> None:
    topic = gate.topic("versioned")
    for version in (9, 1, 2, 3):
        topic.trigger("k", version=version, delay="1h")
    [row] = json.loads(command("key", "show", "k", "--json").out)["timeline"]
    assert (row["what"], row["times"]) == ("dropped_version", 3)
    assert row["from"] <= row["at"]


def test_an_evicting_server_is_named_where_acts_and_histories_are_shown(
    gate: Gate, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.operate.servers._ask_if_allowed", lambda *_: {"evicted_keys": 1234})
    said = "idemgate: acts and histories may be missing: the server evicted 1,234 keys\n"
    assert [command(*words.split()).err for words in ("act ls", "key show k", "worker ls")] == [said, said, ""]
    monkeypatch.setattr("idemgate.operate.servers._ask_if_allowed", lambda *_: None)
    assert command("act", "ls").err == ""


def test_a_buried_message_is_shown_as_a_dead_letter(filled: Gate, command: Command) -> None:
    # Given a message that was buried, one in a group of another slot, and one whose burial the history forgot
    topic = filled.topic("wide", slots=64)
    assert slot_of(b"grouped", 64) != slot_of(b"g", 64)
    topic.trigger("grouped", {"n": 7}, group="g")
    topic.bury("grouped", group="g", reason="no stock")
    for key, state in {"bad": "dead letter", "wors*": "absent"}.items():
        assert json.loads(command("key", "show", key, "--json").out)["state"] == state
    [letter] = json.loads(command("key", "show", "bad", "--values", "--json").out)["dead_letters"]
    assert (letter["topic"], letter["reason"], letter["payload"]) == ("jobs", "ValueError: bad", {"n": 1})
    assert "payload" not in json.loads(command("key", "show", "bad", "--json").out)["dead_letters"][0]
    facts = json.loads(command("key", "show", "grouped", "--json").out)
    assert [(one["topic"], one["reason"]) for one in facts["dead_letters"]] == [("wide", "no stock")]
    assert facts["state"] == ""  # another message of this key waits
    # And the printed id redrives it
    assert command("dead", "redrive", "jobs", letter["id"]).code == 0
    assert json.loads(command("key", "show", "bad", "--json").out)["dead_letters"] == []


def test_dead_letters_of_a_key_are_sought_in_a_bounded_number_of_slots(
    gate: Gate, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.topics.registry.MOST_SLOTS", 2)
    for name in ("a", "b", "c"):
        gate.topic(name).trigger("k", 1)
        gate.topic(name).bury("k")
    found = json.loads(command("key", "show", "k", "--json").out)["dead_letters"]
    assert [one["topic"] for one in found] == ["a", "b"]


def test_the_owner_of_a_key_is_named_as_worker_show_takes_it(
    filled: Gate, command: Command, raw: Any, namespace: str
) -> None:
    filled.context.link.run(beat(namespace, None, "0" * 32, b"report", named=True))
    raw.delete(*keys.presence(namespace, "0" * 32))
    [record] = json.loads(command("key", "show", "runs", "--json").out)["records"]
    assert record["process"] == f"{socket.gethostname()}:{os.getpid()}"


def test_a_key_says_that_its_work_ran_twice(filled: Gate, command: Command, url: str, namespace: str) -> None:
    # Given a claim that another one took over, and that ended after it
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 3600)) as earlier:
        first = earlier.claim("pay", lease="1s")
        filled.claim("pay", lease="1m").complete("paid")
        first.complete("paid")
        # Two processes send what they note, each when its time has come
        wait_until(lambda: {"lost", "taken_over"} <= {what for what, _, _ in timeline(command, "pay")})
    # Then the key says so, and another one does not
    shown = command("key", "show", "pay").out
    told = r"^ran twice +in claim: .* ended it after its lease had ended, and .* ran it again$"
    assert re.search(told, shown, re.MULTILINE)
    assert "ran twice" not in command("key", "show", "runs").out
    # And so does the key of a message
    topic = filled.topic("late")
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 3600)) as earlier:
        earlier.topic("late").trigger("k", 1)
        [delivery] = earlier.topic("late").take(1)
    [again] = topic.take(1)
    topic.ack(again)
    topic.ack(delivery)
    assert re.search(r"^ran twice +in late: ", command("key", "show", "k").out, re.MULTILINE)


def test_acts_quote_their_arguments(filled: Gate, command: Command) -> None:
    filled.topic("jobs").trigger("order 7; rm\x1b", delay="1h")
    for words in (
        ("flush", "jobs", "--key", "order 7; rm\x1b"),
        ("pause", "jobs"),
        ("flush", "jobs", "--key", "waits"),
    ):
        assert command("topic", *words).code == 0
    assert [act["what"] for act in acts(filled)] == [
        "topic flush jobs --key waits", "topic pause jobs", "topic flush jobs --key $'order 7; rm\\U0000001b'",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", [one for one in VERBS if one.changes], ids=lambda verb: verb.title)
@pytest.mark.parametrize("text", ["-v", "--group", "-1 x", "--"])
def test_an_act_can_be_typed_again_with_names_like_options(
    verb: Verb, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # of which `dead import` reads
    values = {"text": text, "pattern": text, "texts": ["-v"], "count": "4"}
    given = {one.name: values[one.kind] for one in verb.parameters if one.kind in values}
    line = describe_act(verb, given)
    assert read_command(f"idemgate {line}") == (verb, given)
    typed = command_line().parse_args(shlex.split(line))
    assert {name: getattr(typed, name) for name in given} == given | {name: 4 for name in given if given[name] == "4"}


def test_an_act_is_found_by_what_it_is_about(filled: Gate, command: Command) -> None:
    # Given acts about keys: in a scope that was not named, with a key that is longer than a command in the list, and
    # with one that is written as a pattern
    long = "k" * 600
    filled.topic("jobs").trigger(long, delay="1h")
    for words in (
        "key cancel runs", f"topic flush jobs --key {long}", "dead rm jobs --key bad --yes",
        "dead redrive jobs --key w*", "topic pause jobs",
    ):  # fmt: skip
        assert command(*words.split()).code == 0

    def acts_in(*words: str) -> list[tuple[str, str]]:
        return [(what, of) for what, of, _ in timeline(command, *words) if " " in what]

    # Then the key shows them, with their topic or scope
    assert acts_in("runs") == acts_in("runs", "--scope", "claim") == [("key cancel runs", "claim")]
    assert acts_in("runs", "--scope", "first") == []
    assert acts_in(long) == [(f"topic flush jobs --key {long}"[:497] + "...", "jobs")]
    assert acts_in("bad") == [("dead rm jobs --key bad", "jobs")]
    # And a key that is named like a word of a command shows none
    for word in ("jobs", "topic", "cancel", "w*", "worse"):
        assert acts_in(word) == []


@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
def test_a_gate_that_redacts_hides_keys_in_the_list_of_acts(
    filled: Gate, command: Command, url: str, namespace: str, one: Case
) -> None:
    # Given a change by a gate with `redact`, such as that of a page
    verb, arguments = read_command(shlex.join(["idemgate", *one.words])) or pytest.fail("no verb")
    if "file" in arguments:
        arguments["file"] = Path(arguments["file"]).read_text()
    given = parse_given(verb, arguments)
    with Gate(url, namespace=namespace, presence=False, redact=lambda kind, text: f"<{kind}>") as hiding:
        perform(hiding, verb, given, who="ann", why="a reason")
    # Then its act holds no key
    [act] = acts(filled)
    hidden = [given[name] for name in ("key", "group", "event_id") if given.get(name)]
    assert not {*hidden} & {*act["what"].split()}
    assert act["what"].count("<key>") == len(hidden)
    assert act["subject"].key not in [key.encode() for key in hidden]
    assert act["why"] == "a reason"
    # And the key still shows it
    if hidden:
        assert act["what"] in [what for what, _, _ in timeline(command, given["key"])]


def test_what_a_verb_does_names_its_operator(filled: Gate, command: Command, url: str, namespace: str) -> None:
    # Given changes by a command, and by a page that knows who asks, whose name is as short as the id of a process
    assert command("topic", "cancel", "jobs", "grouped", "--yes").code == 0
    with Gate(url, namespace=namespace, presence=False) as gate:
        for words in (
            "key resolve held --again", "topic bury jobs waits", "dead rm jobs --key bad", "topic pause jobs",
        ):  # fmt: skip
            verb, arguments = read_command(f"idemgate {words}") or pytest.fail("no verb")
            perform(gate, verb, parse_given(verb, arguments), who="ann@desk")
    # Then what they did names them, as the list of acts does
    for key, who in {"grouped": who_runs(), "held": "ann@desk", "waits": "ann@desk"}.items():
        rows = json.loads(command("key", "show", key, "--json").out)["timeline"]
        assert [row["by"] for row in rows] == [who, who]
    rows = json.loads(command("key", "show", "bad", "--json").out)["timeline"]
    assert [(row["what"], row["by"]) for row in rows[:-1]] == [
        ("deleted", "ann@desk"), ("dead rm jobs --key bad", "ann@desk"),
    ]  # fmt: skip
    pause = stats(filled).paused
    assert pause.by == "ann@desk"
    # And what a program does names the program
    filled.topic("jobs").resume()
    filled.topic("jobs").pause()
    assert stats(filled).paused.by == process_name()


def test_an_absent_key_says_since_when_there_would_be_a_trace(filled: Gate, command: Command) -> None:
    facts = json.loads(command("key", "show", "never", "--json").out)
    assert (facts["state"], facts["timeline"]) == ("absent", [])
    age = datetime.now(UTC) - datetime.fromisoformat(facts["no_trace_since"])
    assert abs(age - timedelta(days=30)) < timedelta(minutes=5)
    assert "no trace since" in command("key", "show", "never").out
    # And one that is there says nothing of it
    assert "no trace since" not in command("key", "show", "done").out


def test_the_process_of_a_transition_is_named_also_when_it_has_ended(
    filled: Gate, command: Command, raw: Any, namespace: str
) -> None:
    # Given a delivery that this process buried before it reported, and one after
    facts = json.loads(command("key", "show", "bad", "--json").out)
    assert facts["timeline"][0]["by"] == process_bytes().hex()
    filled.context.link.run(beat(namespace, None, "0" * 32, b"report", named=True))
    raw.delete(*keys.presence(namespace, "0" * 32))
    # Then its name is known
    facts = json.loads(command("key", "show", "bad", "--json").out)
    assert facts["timeline"][0]["by"] == process_name()


# -- the table --------------------------------------------------------------------------------------------------------


def test_these_cases_are_all_verbs() -> None:
    changing = {one.words[:2] for one in CHANGES}
    assert changing == {(verb.noun, verb.name) for verb in VERBS if verb.changes}
    reading = {tuple(words.split()[:2]) for words in READS} | {HELD, ("dead", "export"), ("worker", "show")}
    assert reading == {(verb.noun, verb.name) for verb in VERBS if not verb.changes}


def test_each_noun_has_verbs_and_no_verb_is_declared_twice() -> None:
    names = [(verb.noun, verb.name) for verb in VERBS]
    assert {noun for noun, _ in names} == set(NOUNS)
    assert len(names) == len(set(names))
    for verb in VERBS:
        assert len({one.name for one in verb.parameters}) == len(verb.parameters), verb.name
        assert not verb.loses or verb.changes, verb.name


@for_each("noun", NOUNS)
def test_the_help_names_the_verbs_of_a_noun_and_their_parameters(command: Command, noun: str) -> None:
    assert noun in command("--help").out
    overview = command(noun, "--help").out
    for verb in [one for one in VERBS if one.noun == noun]:
        assert re.search(rf"^    {verb.name}\b", overview, re.MULTILINE)
        whole = command(noun, verb.name, "--help").out
        for parameter in verb.parameters:
            assert parameter.required or f"--{parameter.name.replace('_', '-')}" in whole
        assert ("--dry-run" in whole, "--yes" in whole) == (verb.changes, verb.loses)


def test_the_page_of_operations_names_each_verb() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert {f"{one.noun} {one.name}" for one in VERBS if f"`{one.noun} {one.name}" not in page} == set()


# -- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
@pytest.mark.parametrize("role", ["everybody", "operator"])
def test_a_change_is_looked_at_made_and_recorded(
    command: Command, filled: Gate, url: str, users: Any, stored: Any, one: Case, role: str
) -> None:
    user = url if role == "everybody" else users(role, *SCANNING.get(one.words[:2], ()))
    # When it is only looked at, Then nothing is written
    before = stored()
    looked = command(*one.words, "--dry-run", "--json", as_user=user)
    assert (looked.code, stored()) == (0, before), looked.err
    assert isinstance(json.loads(looked.out), dict)
    # When it is made, Then it says what it did, and did it
    made = command(*words_of(one.words), "--why", "a reason", "--json", as_user=user)
    assert made.code == 0, made.err
    assert one.answer.items() <= json.loads(made.out).items()
    assert one.effect(filled)
    # And it stands in the list of acts, without payloads and results
    [act] = acts(filled)
    assert act["what"].split()[:3] == list(one.words[:3])
    assert act["why"] == "a reason"
    assert "@" in act["who"]
    assert '{"n":9}' not in act["what"]
    assert "--result 7" not in act["what"]
    assert " ".join(one.words[:3]) in command("act", "ls").out


@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
def test_a_viewer_is_refused_and_nothing_is_written(
    command: Command, filled: Gate, users: Any, stored: Any, one: Case
) -> None:
    user, before = users("viewer"), stored()
    ran = command(*words_of(one.words), as_user=user)
    assert (ran.code, ran.out) == (1, "")
    assert "access list" in ran.err
    assert stored() == before


@pytest.mark.parametrize("words", READS)
@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_verb_that_reads_writes_nothing(
    command: Command, filled: Gate, users: Any, stored: Any, words: str, role: str
) -> None:
    user, before, expected = users(role), stored(), READS[words]
    ran = command(*words.split(), "--json", as_user=user)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    if isinstance(expected, int):
        assert len(found) == expected
    else:
        assert expected.items() <= found.items()
    text = command(*words.split(), as_user=user)
    assert (text.code, stored()) == (0, before)
    assert text.out


def test_held_keys_are_found_by_an_operator_who_may_scan(
    command: Command, filled: Gate, users: Any, stored: Any
) -> None:
    before = stored()
    assert command(*HELD, as_user=users("operator")).code == 1
    both = users("operator", "auditor")
    rows = json.loads(command(*HELD, "--json", as_user=both).out)
    assert sorted((row["scope"], row["key"]) for row in rows) == [("claim", "held"), ("claim", "held too")]
    assert len(json.loads(command(*HELD, "--json", "--limit", "1", as_user=both).out)) == 1
    assert stored() == before


# -- the list of acts -------------------------------------------------------------------------------------------------


def test_a_retry_records_an_act_once(gate: Gate) -> None:
    call = record_call(gate, "ann@host", "topic pause t", "")
    for _ in range(2):
        gate.context.link.run(call)
    gate.context.link.run(record_call(gate, "ann@host", "topic pause t", ""))
    assert len(acts(gate)) == 2


def test_only_the_newest_acts_are_kept(command: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemgate.operate.acts.KEPT_ACTS", 3)
    for n in range(5):
        gate.context.link.run(record_call(gate, "ann@host", f"act {n}", "x" * 10_000))
    assert [act["what"] for act in acts(gate)] == ["act 4", "act 3", "act 2"]
    assert all(len(act["why"]) == 500 for act in acts(gate))
    assert len(json.loads(command("act", "ls", "--limit", "2", "--json").out)) == 2


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "scope move claim other --yes": "has keys in progress: 1. Stop all callers of the scope",
    "scope move first first --yes": "the same scope",
    "topic pause nothing": "no such topic in the store. There are: empty, jobs",
    f"topic pause jobs --why {'x' * 501}": "a text of 501 characters",
    "topic flush nothing": "no such topic",
    "topic messages jobs --limit 1001": "Use at most 1000",
    "topic messages jobs --after 5:x": "not where a page ended",
    "topic messages jobs --after 9:1.0:k": "not where a page ended",
    "topic transfer jobs nothing": "no such topic in the store. There are: empty, jobs",
    "topic transfer jobs jobs": "the same topic",
    "topic delete nothing --yes": "no such topic",
    "topic reshard nothing 4": "no such topic",
    "topic reshard jobs 3": "not a power of two",
    "topic reshard jobs 0": "not a whole number of at least 1",
    "topic reshard jobs many": "not a whole number",
    "topic move jobs waits": "Give --at or --delay",
    "topic move jobs waits --at 2026-12-24T18:00": "has no offset. Add Z for UTC, or +01:00",
    "topic move jobs waits --at tomorrow": "is no time such as",
    "topic move jobs waits --delay soon": "soon",
    "topic trigger jobs new --payload {n:1}": "is not JSON",
    "topic trigger jobs new --priority 5": "priority=5",
    "topic trigger jobs new --delay 1s --at 2026-12-24T18:00Z": "at=",
    "key show": "required: KEY",
    "key forget absent --yes": "not found in the scopes that the store knows (claim, first)",
    "key forget twice --yes": "several scopes have this key. Name one: claim, first",
    "key resolve held": "Give either --done or --again",
    "key resolve held --done": "the store does not know the scope 'claim'",
    "key resolve held --done --result x": "is not JSON",
    "dead redrive jobs": "or --all",
    "dead redrive jobs 1-1 --all": "not one selection",
    "dead redrive jobs --all --limit 0": "at least 1",
    "dead redrive jobs one": "not the id of a dead letter",
    "dead redrive jobs --all --rate fast": "not a rate",
    "dead redrive jobs --all --rate 1/1w": "1w",
    "dead import jobs nowhere": "'nowhere' cannot be read",
    "dead import nothing letters": "no such topic",
    "dead rm jobs --since 2026-12-24 --yes": "has no offset",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    command: Command, filled: Gate, stored: Any, words: str
) -> None:
    before = stored()
    ran = command(*words.split())
    assert (ran.code, ran.out) == (2, "")
    assert REFUSED[words] in " ".join(ran.err.split())
    assert stored() == before


def test_a_key_is_found_without_its_scope_and_topic(command: Command, filled: Gate) -> None:
    found = json.loads(command("key", "show", "runs", "--json").out)
    assert [(one["scope"], one["state"]) for one in found["records"]] == [("claim", "in_progress")]
    assert [(one["topic"], one["state"], one["triggers"]) for one in found["messages"]] == [("jobs", "in flight", 1)]
    grouped = json.loads(command("key", "show", "grouped", "--json").out)
    assert [(one["state"], one["group"]) for one in grouped["messages"]] == [("pending", "g")]
    absent = command("key", "show", "nowhere")
    assert absent.code == 0
    assert re.search(r"state +absent\n.*searched +claim, first\n.*searched +empty, jobs", absent.out)


def test_a_key_is_found_in_each_slot_by_a_script_for_each_topic(
    command: Command, gate: Gate, raw: Any, namespace: str
) -> None:
    # Given topics of 64 slots, and a key with a group, so that its slot is another one than that of the key
    for number in range(8):
        gate.topic(f"t{number}", slots=64).open()
    assert slot_of(b"k", 64) != slot_of(b"g", 64)
    gate.topic("t3").trigger("k", 1, group="g", delay="1h")
    gate.topic("t5").trigger("k", 1, group="g", delay="1h")
    gate.topic("t5").cancel("k", group="g")

    def scripts() -> int:
        return raw.info("commandstats")["cmdstat_evalsha"]["calls"]

    # Then it is found there, and scripts read no other slots
    command("key", "show", "k")
    before = scripts()
    found = json.loads(command("key", "show", "k", "--json").out)
    assert scripts() - before < 30
    assert [(one["topic"], one["group"]) for one in found["messages"]] == [("t3", "g")]
    assert [(row["of"], row["what"]) for row in found["timeline"]] == [("t5", "cancelled")]
    # And what is no slot is refused
    raw.set(keys.slot_messages(namespace, "t0", 7, 64), "x")
    refused = command("key", "show", "k")
    assert (refused.code, "holds a string, expected a hash" in refused.err) == (1, True)
    raw.delete(keys.slot_messages(namespace, "t0", 7, 64))


def test_a_key_is_found_while_its_topic_changes_its_slots(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = gate.topic("t", slots=2)
    topic.trigger("k", delay="1h")
    probe = gate.context.link.probe

    def probe_and_reshard(requests: Any) -> list[Any]:
        topic.reshard(4)
        return probe(requests)

    monkeypatch.setattr(gate.context.link, "probe", probe_and_reshard)
    assert len([seen for seen in find_messages(gate.context, "k")["t"] if seen.pending]) == 1


def test_a_scope_that_a_program_registered_is_searched(command: Command, gate: Gate) -> None:
    guarded = gate.once(key="{n}", scope="orders", retention="1h")(lambda n: n)
    guarded(7)
    gate.context.link.run(register_retention(gate.context, "orders", 3_600_000))
    [record] = json.loads(command("key", "show", "7", "--json").out)["records"]
    assert (record["scope"], record["state"]) == ("orders", "done")


def test_of_a_key_in_several_groups_one_has_to_be_named(command: Command, gate: Gate) -> None:
    topic = gate.topic("t", slots=4)
    assert len({slot_of(route, 4) for route in (b"a", b"d", b"k")}) == 3  # in one slot they would be one message
    for group in ("a", "d", None):
        topic.trigger("k", 1, delay="1h", group=group)
    refused = command("topic", "cancel", "t", "k", "--yes")
    assert refused.code == 2
    assert "several groups. Name one: (none), a, d" in refused.err
    assert command("topic", "cancel", "t", "k", "--yes", "--group", "a").code == 0
    assert topic.peek("k", group="a").pending is None
    assert topic.peek("k", group="d").pending is not None


def test_the_groups_with_the_most_messages_that_wait_are_listed(command: Command, gate: Gate) -> None:
    topic = gate.topic("t", slots=2)
    assert command("group", "ls", "nothing").code == 2
    # Given groups of which one message runs, and others wait
    topic.trigger_many([Trigger(f"{group}{n}", n, group=f"g{group}") for group in range(7) for n in range(group + 2)])
    topic.take(100)
    # Then the largest five are listed
    rows = json.loads(command("group", "ls", "t", "--json").out)
    assert [(row["group"], row["messages"]) for row in rows] == [("g6", 7), ("g5", 6), ("g4", 5), ("g3", 4), ("g2", 3)]
    assert re.search(r"^g6 +7 +20\d\d-", command("group", "ls", "t").out, re.MULTILINE)
    assert command("group", "ls", "t").out.splitlines()[0].split() == ["group", "messages", "oldest", "due"]


def test_what_loses_data_asks(command: Command, filled: Gate, stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("topic", "delete", "empty")
    # Without a terminal it refuses, and says what to do
    before = stored()
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        refused = command(*words)
    assert (refused.code, refused.out) == (2, "")
    assert "Look with --dry-run, then add --yes" in refused.err
    # On a terminal it shows what would change, and goes on only after "yes"
    for answer, code in ((b"y\n", 2), (b"\x04", 2), (b"yes\n", 0)):
        assert stored() == before
        master, slave = pty.openpty()
        with os.fdopen(slave) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            os.write(master, answer)
            ran = command(*words)
        os.close(master)
        assert ran.code == code
        assert "topic      empty" in ran.err
        assert ("Nothing was changed" in ran.err) is (code == 2)
    assert [one.name for one in filled.stored_topics()] == ["jobs"]


# -- what is printed --------------------------------------------------------------------------------------------------


def test_names_are_escaped_in_text(command: Command, gate: Gate) -> None:
    key = "k\x1b[2J\nall is well\u202e"
    topic = gate.topic("t")
    topic.trigger(key, "\x1b[2J")
    gate.claim(key)
    gate.context.link.run(record_call(gate, "ann\x1b[2J", f"key show {key}", ""))
    printed = [
        command("key", "show", key, "--values"),
        command("topic", "peek", "t", key, "--values"),
        command("topic", "cancel", "t", key, "--dry-run"),
        command("act", "ls"),
        command("topic", "pause", "t", "--why", key),
        command("topic", "ls"),
        command("topic", "show", "t"),
    ]
    topic.resume()
    topic.bury(topic.take(1)[0], reason="\x1b[2J")
    printed += [command("dead", "ls", "t", "--values"), command("topic", "flush", "t", "--key", key)]
    for ran in printed:
        assert ran.code == 0, ran.err
        assert [char for char in ran.out + ran.err if not char.isprintable() and char != "\n"] == []
        assert "all is well" not in ran.out.splitlines()
    # JSON has them in full
    assert json.loads(command("dead", "ls", "t", "--json").out)[0]["key"] == key


def test_a_topic_is_shown_with_what_holds_it_back(command: Command, gate: Gate) -> None:
    # Given a topic that is paused, with a message that waits for its group
    topic = gate.topic("t")
    for key in ("a", "b"):
        topic.trigger(key, group="g")
    topic.take(9)
    topic.pause("an outage")
    pause = topic.stats().paused
    # Then its group, the time since when it is due, and who paused it are shown
    shown = json.loads(command("topic", "show", "t", "--json").out)
    [group] = shown["blocked_groups"]
    assert (shown["oldest_blocked"], group["group"], group["messages"]) == ("g", "g", 1)
    assert shown["oldest_due"] == group["oldest_due"] == topic.stats().oldest_due.isoformat()
    assert shown["lateness"] >= 0
    assert shown["paused"] == {"since": pause.since.isoformat(), "by": pause.by, "reason": "an outage"}
    for words in (("show", "t"), ("ls",)):
        assert f"since={pause.since:%Y-%m-%d %H:%M:%S}Z by={pause.by} reason=an outage" in command("topic", *words).out


def test_pending_messages_are_listed_a_page_at_a_time(command: Command, filled: Gate) -> None:
    shown = json.loads(command("topic", "messages", "jobs", "--limit", "1", "--json").out)
    [first] = shown["messages"]
    assert "payload" not in first
    rest = json.loads(command("topic", "messages", "jobs", "--after", shown["after"], "--values", "--json").out)
    rows = {row["key"]: row for row in [first, *rest["messages"]]}
    assert {key: (row["state"], row["group"]) for key, row in rows.items()} == {
        "waits": ("scheduled", None), "grouped": ("scheduled", "g"),
    }  # fmt: skip
    assert rest["messages"][0]["payload"] in (1, {"n": 3})  # which one is due first, the clock decides
    printed = command("topic", "messages", "jobs", "--limit", "1").out
    assert re.search(r"^after +1:", printed, re.MULTILINE)
    assert "nothing is pending" in command("topic", "messages", "empty").out


def test_a_topic_with_another_merge_policy_gets_no_messages(command: Command, filled: Gate, stored: Any) -> None:
    filled.topic("sums", merge="sum").open()
    before = stored()
    ran = command("topic", "transfer", "jobs", "sums")
    assert (ran.code, "it merges by sum, and jobs by last" in ran.err, stored()) == (2, True, before)


def test_a_transfer_says_how_far_it_is(
    command: Command, gate: Gate, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr("idemgate.operate.topics.monotonic", lambda: next(seconds))
    gate.topic("t").trigger_many([Trigger(f"k{n}", n, delay="1h") for n in range(120)])
    gate.topic("to").open()
    caplog.set_level("INFO", "idemgate.operate")
    assert command("topic", "transfer", "t", "to").code == 0
    told = [
        record.moved for record in caplog.records if record.message.startswith("operate.transfer topic='t' to='to'")
    ]
    assert told == [50, 100, 120]


def test_dead_letters_are_exported_a_line_each(command: Command, gate: Gate) -> None:
    topic = gate.topic("t", slots=2)
    for n in range(120):
        topic.trigger(f"k{n}", n)
    topic.trigger("odd", (1, 2))
    while taken := topic.take(100):
        for delivery in taken:
            topic.bury(delivery, reason="why")
    lines = [json.loads(line) for line in command("dead", "export", "t").out.splitlines()]
    assert {line["key"]: line["payload"] for line in lines if "payload" in line} == {f"k{n}": n for n in range(120)}
    [odd] = [line for line in lines if "payload" not in line]
    assert (odd["key"], odd["payload_msgpack"]) == ("odd", "xwMHkgEC")
    assert {"id", "reason", "died_at", "attempts", "triggers", "first_at", "last_at"} <= odd.keys()
    assert command("dead", "export", "t", "--key", "odd").out.count("\n") == 1


@pytest.mark.damages("undecodable")
def test_what_was_exported_is_imported(
    command: Command, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given exported letters, also of a codec that this program does not have, which were deleted
    topic, file = gate.topic("t", slots=2), tmp_path / "letters"
    for n in range(120):
        topic.trigger(f"k{n}", n)
        topic.bury(f"k{n}", reason=f"reason {n}")
    foreign = unpack(topic.dead.list(1)[0].stored, "a letter")
    other = pack([b"other", pack_message(b"\xfe?"), *foreign[2:]])
    assert topic.dead.load([other]).added == 1
    exported = command("dead", "export", "t").out
    file.write_text(f"\n{exported}")
    assert topic.dead.delete() == 121
    # When they are imported from a file, and again from the standard input
    looked = json.loads(command("dead", "import", "t", str(file), "--dry-run", "--json").out)
    assert (looked["letters"], len(looked["samples"]), topic.stats().dead) == (121, 3, 0)
    made = json.loads(command("dead", "import", "t", str(file), "--json").out)
    assert (made["added"], made["present"], made["expired"], made["full"]) == (121, 0, 0, 0)
    monkeypatch.setattr(sys, "stdin", io.StringIO(exported))
    assert re.search(r"added +0\npresent +121\n", command("dead", "import", "t").out)
    # Then they are the same, and the list of acts names the file and no content
    assert rows_of(command("dead", "export", "t").out) == rows_of(exported)
    assert [act["what"] for act in acts(gate)] == ["dead import t -", f"dead import t {file}"]


def rows_of(exported: str) -> list[Any]:
    """The rows by id, without the stored bytes: the number of a trigger in them is another one."""
    rows = sorted(map(json.loads, exported.splitlines()), key=lambda row: row["id"])
    return [{name: value for name, value in row.items() if name != "stored"} for row in rows]


@for_each(
    ("line", "problem"),
    {
        "{": "line 2 of letters='{': JSONDecodeError",
        "7": "TypeError",
        "{}": "KeyError",
        '{"stored": 7}': "TypeError",
        '{"stored": "!"}': "Error",
        '{"stored": "AAAA"}': "expected a dead letter",
        '{"stored": "\\u001b[2J"}': "Error",
    }.items(),
)
def test_one_wrong_line_is_named_and_nothing_is_imported(
    command: Command, filled: Gate, stored: Any, line: str, problem: str
) -> None:
    good = Path("letters").read_text().splitlines(keepends=True)[0]
    Path("letters").write_text(f"{good}{line}\n{good}")
    before = stored()
    ran = command("dead", "import", "jobs", "letters")
    assert (ran.code, ran.out) == (2, "")
    assert problem in ran.err
    assert "Pass lines of `dead export`" in ran.err
    assert "\x1b" not in ran.err
    assert stored() == before


class Pauses:
    """Stands for the clock and the sleep of a redrive. It notes each pause, and a `break_at` of them is a Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.taken, self.break_at = 0.0, list[float](), -1
        monkeypatch.setattr("idemgate.operate.dead.monotonic", lambda: self.now)
        monkeypatch.setattr("idemgate.operate.dead.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        if len(self.taken) == self.break_at:
            raise KeyboardInterrupt
        self.taken.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("chosen", [["--all"], ["--key", "k*"], ["--limit", "130", "--key", "k*"]], ids=len)
def test_a_redrive_has_a_rate_and_goes_on_after_an_interruption(
    command: Command, gate: Gate, caplog: Any, monkeypatch: pytest.MonkeyPatch, chosen: list[str]
) -> None:
    topic, pauses = gate.topic("t"), Pauses(monkeypatch)
    for n in range(130):
        topic.trigger(f"k{n}", n)
        topic.bury(f"k{n}")
    caplog.set_level("INFO", "idemgate.operate")
    words = ["dead", "redrive", "t", *chosen, "--rate", "20/1s", "--json"]
    # When a redrive of 20 letters a second is interrupted in its third pause
    pauses.break_at = 2
    assert command(*words).code == 130
    # Then it moved at most 20 before each of two seconds, and 20 after them, and said so
    moved = topic.stats().ready
    assert (40 < moved <= 60, topic.stats().dead, pauses.now) == (True, 130 - moved, 2.0)
    progress = [record.redriven for record in caplog.records if record.message.startswith("operate.redrive topic='t'")]
    assert (progress[-1], sorted(progress)) == (moved, progress)
    # And the same command goes on with the rest
    pauses.break_at = -1
    assert json.loads(command(*words).out)["redriven"] == 130 - moved
    assert (topic.stats().ready, topic.stats().dead) == (130, 0)
    assert pauses.now - 2.0 >= (110 - moved) / 20


def test_a_redrive_of_few_letters_waits_for_nothing(
    command: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, pauses = gate.topic("t"), Pauses(monkeypatch)
    for n in range(2):
        topic.trigger(f"k{n}", n)
        topic.bury(f"k{n}")
    assert json.loads(command("dead", "redrive", "t", "--all", "--json").out)["redriven"] == 2
    assert pauses.taken == []
    assert json.loads(command("dead", "redrive", "t", "--all", "--dry-run", "--json").out)["a_second"] == 1000


def test_a_redrive_says_how_many_letters_have_no_room(command: Command, gate: Gate) -> None:
    topic = gate.topic("t", merge=append(1))
    for key in ("full", "free"):
        topic.trigger(key, "old")
        topic.bury(key)
    topic.trigger("full", "new")
    # When one of two letters would drop a newer trigger
    redriven = command("dead", "redrive", "t", "--all", "--json")
    # Then it stays, and the command says so
    assert json.loads(redriven.out) == {"topic": "t", "redriven": 1, "without_room": 1}
    assert [letter.key for letter in topic.dead.list()] == ["full"]


def test_a_payload_that_json_cannot_hold_is_shown(command: Command, gate: Gate) -> None:
    gate.topic("t").trigger("k", {(1, 2): {3}, "nan": float("nan")})
    [row] = json.loads(command("topic", "peek", "t", "k", "--values", "--json").out)["messages"]
    assert row["payload"] == "{(1, 2): {3}, 'nan': nan}"


def test_an_empty_list_says_so(command: Command, gate: Gate) -> None:
    gate.topic("t").open()
    assert command("dead", "ls", "t").out.startswith(f"nothing found in namespace {gate.namespace!r}")
    assert json.loads(command("dead", "ls", "t", "--json").out) == []
