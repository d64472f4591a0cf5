"""`idemgate scope move`: the keys of a function that was renamed stay done."""

from __future__ import annotations

import json
from typing import Any

from idemgate import Gate
from idemgate.core.keys import record, scopes
from idemgate.errors import AttemptsExhausted
from idemgate.operate.keys import scopes_call
from tests.operate.conftest import Command


def move(command: Command, before: str, after: str) -> dict[str, Any]:
    ran = command("scope", "move", before, after, "--yes", "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)  # type: ignore[no-any-return]


KEYS = ["plain", "with:colon", "sp ace", "ü", "x" * 500, "7"]


def test_a_renamed_function_knows_what_is_done(gate: Gate, command: Command, raw: Any) -> None:
    # Given a function that ran for many keys
    ran: list[str] = []

    @gate.once(key="{key}", scope="shop.app.charge[old]", retention="1h")
    def charge(key: str) -> str:
        ran.append(key)
        return f"receipt of {key}"

    for key in KEYS:
        charge(key)
    before = {key: charge.inspect(key) for key in KEYS}
    # When its scope is moved
    assert move(command, "shop.app.charge[old]", "charge:new") == {
        "scope": "shop.app.charge[old]", "to": "charge:new", "moved": len(KEYS), "kept": 0,
    }  # fmt: skip

    # Then the function of the new scope gets the results
    @gate.once(key="{key}", scope="charge:new", retention="1h")
    def renamed(key: str) -> str:
        raise AssertionError("it ran again")

    assert [renamed(key) for key in KEYS] == [f"receipt of {key}" for key in KEYS]
    for key in KEYS:
        after = renamed.inspect(key)
        assert (after.state, after.attempts, after.value) == ("done", 1, before[key].value)
        assert abs((after.retention_left or 0) - (before[key].retention_left or 0)) < 60
        assert charge.inspect(key).state == "absent"
    # And the next move finds nothing
    assert move(command, "shop.app.charge[old]", "charge:new")["moved"] == 0


def test_attempts_and_held_keys_move(filled: Gate, command: Command) -> None:
    # Given a key that has no attempt left, and keys that wait for a decision
    assert filled.guard("old", max_attempts=1).run("k", lambda: 1 / 0).outcome == "rejected"
    filled.forget("runs", force=True)
    # When their scopes are moved
    assert move(command, "old", "new")["moved"] == 1
    assert move(command, "claim", "claims")["moved"] == 4  # with what keeps the token of the forgotten one
    # Then that is so in the other scope
    assert isinstance(filled.guard("new", max_attempts=1).run("k", print).error, AttemptsExhausted)
    assert filled.inspect("held", scope="claims").state == "held"


def test_a_record_that_the_other_scope_has_stays(gate: Gate, command: Command) -> None:
    gate.first("a", "1h", scope="old")
    gate.first("b", "1h", scope="old")
    gate.first("b", "1h", scope="new")
    assert move(command, "old", "new") | {"scope": "", "to": ""} == {"scope": "", "to": "", "moved": 1, "kept": 1}
    assert gate.inspect("b", scope="old").state == "done"


def test_a_move_that_was_interrupted_goes_on(gate: Gate, command: Command, raw: Any, namespace: str) -> None:
    # Given a record that was copied, and not deleted yet
    gate.first("a", "1h", scope="old")
    raw.restore(record(namespace, "new", "a"), 3_600_000, raw.dump(record(namespace, "old", "a")))
    # When the command runs again
    assert move(command, "old", "new")["moved"] == 1
    # Then it is there once
    assert gate.inspect("a", scope="old").state == "absent"
    assert gate.inspect("a", scope="new").state == "done"


def test_the_store_knows_the_other_scope(gate: Gate, command: Command) -> None:
    from idemgate.guard.claim_calls import register_retention

    gate.context.link.run(register_retention(gate.context, "old", 60_000))
    move(command, "old", "new")
    assert gate.context.link.run(register_retention(gate.context, "new", 0)) == 60_000


def test_thousands_of_scopes_are_found(gate: Gate, raw: Any) -> None:
    raw.hset(scopes(gate.namespace), mapping={f"s{n}": 1 for n in range(9_000)})
    assert {*gate.context.link.run(scopes_call(gate))} == {f"s{n}" for n in range(9_000)}
    raw.delete(scopes(gate.namespace))
