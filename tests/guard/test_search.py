"""No interleaving of a small scope breaks a promise of a guarded key, and the search finds each fault that is put into
the scripts.

`IDEMGATE_DEPTH=8 pytest tests/guard/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from idemgate.guard import claim_calls
from tests.exhaustive import choose_depth
from tests.faults import broken
from tests.guard.search import PLAIN, Search, Violation

DEPTH = choose_depth(4, 5, 6)  # one more takes about eight times as long
SCOPES = {
    "an owner that vanished is taken over": {"hold": False},
    "an owner that vanished is waited for": {"hold": True},
    "a failure is shared with those who waited": {"share": True},
}
PLAIN_SCOPES = {
    "claims without a script, taken over": {"plain": True},
    "claims without a script, waited for": {"plain": True, "hold": True},
}
FROM_7 = pytest.mark.servers("7.0")
"""Redis 6.2 has no PEXPIRETIME, and no such claims."""


@pytest.mark.timeout(7200)
@DEPTH
@pytest.mark.parametrize("scope", SCOPES)
def test_no_interleaving_breaks_a_promise(raw: Any, gate: Gate, scope: str, depth: int, record_fault: Any) -> None:
    states = Search(raw, gate, {}, **SCOPES[scope]).run(depth)
    print(f"{scope}: {states:,} states within {depth} steps")
    assert states > 500
    record_fault(
        "every order of steps of a guarded key, with lost replies and late copies (N: states)",
        states,
        promises="P1 P2 P3 P4 P5 P6",
        exhaustive=True,
        steps=f"{depth}",
    )


@FROM_7
@pytest.mark.timeout(7200)
@DEPTH
@pytest.mark.parametrize("scope", PLAIN_SCOPES)
def test_no_interleaving_with_plain_commands_breaks_a_promise(
    raw: Any, gate: Gate, scope: str, depth: int, record_fault: Any
) -> None:
    states = Search(raw, gate, {}, **PLAIN_SCOPES[scope]).run(depth)
    print(f"{scope}: {states:,} states within {depth} steps")
    assert states > 500
    record_fault(
        "every order of steps of a key that is claimed and completed with and without a script (N: states)",
        states,
        promises="P1 P2 P3 P4 P5 P6",
        exhaustive=True,
        steps=f"{depth}",
    )


OVER, WAIT, SHARE = SCOPES
FAULTS = [
    (OVER, "guard/claim", "a claim does not look at the lease"),
    (OVER, "guard/claim", "a claim does not know its copies"),
    (OVER, "guard/claim", "tokens do not rise"),
    (OVER, "guard/claim", "a lost lease is not counted"),
    (OVER, "guard/claim", "attempts are not counted"),
    (OVER, "guard/claim", "what is done is free"),
    (OVER, "guard/claim", "what is done stays so for ever"),
    (OVER, "guard/claim", "the lease that is left is more"),
    (WAIT, "guard/claim", "an owner that vanished is not waited for"),
    (OVER, "guard/renew", "a former owner beats"),
    (OVER, "guard/renew", "a heartbeat revives what has ended"),
    (OVER, "guard/renew", "a heartbeat says lost, and holds"),
    (OVER, "guard/complete", "anybody completes"),
    (OVER, "guard/complete", "what an earlier grant did completes a later one"),
    (OVER, "guard/complete", "what was given back is completed"),
    (OVER, "guard/complete", "a lease that lapsed cannot be completed"),
    (OVER, "guard/complete", "a completion does not know its copies"),
    (OVER, "guard/complete", "a copy of a completion lasts longer"),
    (OVER, "guard/complete", "each completed run belongs to the caller"),
    (OVER, "guard/complete", "what was decided was done by the owner that vanished"),
    (OVER, "guard/complete", "what is done loses its fingerprint"),
    (OVER, "guard/complete", "what is done loses its result"),
    (OVER, "guard/complete", "what is done is kept for no time"),
    (OVER, "guard/complete", "the short form does not say that a fingerprint follows"),
    (OVER, "guard/complete", "the short form hides a second attempt"),
    (OVER, "guard/release", "anybody gives back"),
    (OVER, "guard/release", "what is done is given back"),
    (OVER, "guard/release", "giving back does not know its copies"),
    (OVER, "guard/release", "giving back leaves nothing"),
    (SHARE, "guard/claim", "a failure goes to those who did not wait"),
    (SHARE, "guard/claim", "a caller that waited runs"),
    (SHARE, "guard/claim", "a failure stays when the next run starts"),
    (SHARE, "guard/release", "a failure is not kept"),
    (OVER, "guard/forget", "what came since is forgotten"),
    (OVER, "guard/forget", "what has ended since is forgotten"),
    (OVER, "guard/forget", "what is live is forgotten"),
    (OVER, "guard/forget", "forgetting does not know its copies"),
    (OVER, "guard/forget", "forgetting lets tokens fall"),
    (OVER, "guard/resolve", "what came since is decided"),
    (OVER, "guard/resolve", "what is live is decided"),
    (OVER, "guard/resolve", "deciding does not know its copies"),
    (OVER, "guard/resolve", "the owner that vanished keeps a say"),
    (WAIT, "guard/resolve", "what may run again is done"),
]


@pytest.mark.parametrize(("scope", "name", "fault"), FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, scope: str, name: str, fault: str) -> None:
    with pytest.raises(Violation) as found:
        Search(raw, gate, {name: broken(name, fault)}, **SCOPES[scope]).run(6)
    print(found.value)
    Search(raw, gate, {}, **SCOPES[scope]).follow(found.value.path)  # as it is, the script breaks nothing there


FREE, HELD = PLAIN_SCOPES
PLAIN_FAULTS = [
    (FREE, "guard/claim", "the lease of a plain claim never ends"),
    (FREE, "guard/claim", "a plain claim belongs to all"),
    (FREE, "guard/complete", "a plain claim belongs to all"),
    (FREE, "guard/complete", "a plain claim has no token"),
    (FREE, "guard/claim", "what a plain command completed is free"),
    (FREE, "guard/claim", "what a plain command completed is done for ever"),
    (FREE, "guard/complete", "what a plain command completed has no token"),
    (HELD, "guard/claim", "an owner of a plain claim that vanished is not waited for"),
    (FREE, "guard/renew", "a former owner beats"),
    (FREE, "guard/forget", "forgetting lets tokens fall"),
    (FREE, "guard/forget", "a young claim is forgotten at once"),
    (FREE, "guard/forget", "a young claim is forgotten at once, if another caller waits"),
]
WRONG_COMMANDS = {
    "a claim replaces what is there": ("plain/claim", '"NX", ', ""),
    "a claim lasts for no time": ("plain/claim", "now + ARGV[3]", "now + 1"),
    "a completion replaces any record": ("plain/complete", 'redis.call("GET", KEYS[1]) ~= ARGV[6]', "false"),
    "a completion lasts for no time": ("plain/complete", "now + ARGV[5]", "now + 1"),
}


@FROM_7
@pytest.mark.parametrize(("scope", "name", "fault"), PLAIN_FAULTS)
@pytest.mark.slow
def test_a_fault_about_a_plain_record_is_found(raw: Any, gate: Gate, scope: str, name: str, fault: str) -> None:
    with pytest.raises(Violation) as found:
        Search(raw, gate, {name: broken(name, fault)}, **PLAIN_SCOPES[scope]).run(6)
    print(found.value)
    Search(raw, gate, {}, **PLAIN_SCOPES[scope]).follow(found.value.path)


@FROM_7
@pytest.mark.parametrize("fault", WRONG_COMMANDS)
def test_a_wrong_plain_command_is_found(raw: Any, gate: Gate, fault: str) -> None:
    name, right, wrong = WRONG_COMMANDS[fault]
    assert right in PLAIN[name]
    with pytest.raises(Violation) as found:
        Search(raw, gate, {name: PLAIN[name].replace(right, wrong)}, plain=True).run(5)
    print(found.value)


@FROM_7
@pytest.mark.parametrize(("rule", "wrong"), [("PAIR_SECONDS", 3600.0), ("LOOK_SECONDS", 0.0)])
@pytest.mark.slow
def test_a_client_without_patience_or_with_too_much_is_found(
    raw: Any, gate: Gate, rule: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that relies on a late reply, and an operator that does not look at a young claim for long."""
    monkeypatch.setattr(claim_calls, rule, wrong)
    with pytest.raises(Violation, match="reads the token of another claim") as found:
        Search(raw, gate, {}, plain=True).run(6)
    print(found.value)
