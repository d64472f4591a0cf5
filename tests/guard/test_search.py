"""No interleaving of a small scope breaks a promise of a guarded key, and the search finds each fault that is put into
the scripts.

`IDEMGATE_DEPTH=8 pytest tests/guard/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from tests.exhaustive import broken, choose_depth
from tests.guard.search import Search, Violation

DEPTH = choose_depth(4, 5, 6)  # one more takes about eight times as long
SCOPES = {
    "an owner that vanished is taken over": {"hold": False},
    "an owner that vanished is waited for": {"hold": True},
    "a failure is shared with those who waited": {"share": True},
}


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


OVER, WAIT, SHARE = SCOPES
FAULTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "a claim does not look at the lease": (OVER, "guard/claim", {"if left > 0 then": "if left > 1e15 then"}),
    "a claim does not know its copies": (OVER, "guard/claim", {"if owner == token and": "if false and"}),
    "tokens do not rise": (OVER, "guard/claim", {"fence(last, now_us)": "now_us"}),
    "a lost lease is not counted": (OVER, "guard/claim", {"running and taken + 1 or taken": "taken"}),
    "attempts are not counted": (OVER, "guard/claim", {"now_us), attempts + 1": "now_us), 1"}),
    "an owner that vanished is not waited for": (WAIT, "guard/claim", {"running and held == 1": "false"}),
    "what is done is free": (OVER, "guard/claim", {'if kind ~= "" then': 'if state == "f" then'}),
    "what is done stays so for ever": (OVER, "guard/claim", {"ends <= now_ms then": "false then"}),
    "the lease that is left is more": (OVER, "guard/claim", {'"busy", now_ms, left,': '"busy", now_ms, left + 1,'}),
    "a former owner beats": (OVER, "guard/renew", {"r.owner ~= token": "false"}),
    "a heartbeat revives what has ended": (OVER, "guard/renew", {'r.state ~= "p" or': ""}),
    "a heartbeat says lost, and holds": (OVER, "guard/renew", {'"ok", now_ms }': '"lost", now_ms }'}),
    "anybody completes": (
        OVER, "guard/complete", {'state == "p" and owner == ARGV[at] and granted': 'state == "p"'}),
    "what an earlier grant did completes a later one": (
        OVER, "guard/complete", {"owner == ARGV[at] and granted": "owner == ARGV[at]"}),
    "what was given back is completed": (
        OVER, "guard/complete", {'state == "p" and': '(state == "p" or state == "r") and'}),
    "a lease that lapsed cannot be completed": (
        OVER, "guard/complete", {"owner == ARGV[at] and": "owner == ARGV[at] and ends > now_ms and"}),
    "a completion does not know its copies": (OVER, "guard/complete", {'owner == "" and granted': "false"}),
    "a copy of a completion lasts longer": (
        OVER, "guard/complete", {
            'state == "p" and owner == ARGV[at]': '(state == "p" and owner == ARGV[at] or had ~= "" and owner == "")'}),
    "each completed run belongs to the caller": (
        OVER, "guard/complete", {'owner == "" and granted': 'owner == ""'}),
    "what was decided was done by the owner that vanished": (
        OVER, "guard/complete", {'and owner == "" and': "and"}),
    "what is done loses its fingerprint": (
        OVER, "guard/complete", {"now_ms, print, ARGV[at + 3]": 'now_ms, "", ARGV[at + 3]'}),
    "what is done loses its result": (OVER, "guard/complete", {"print, ARGV[at + 3])": 'print, "")'}),
    "what is done is kept for no time": (
        OVER, "guard/complete", {"now_ms + span, now_ms": "now_ms + 1, now_ms"}),
    "the short form does not say that a fingerprint follows": (
        OVER, "guard/complete", {'print == "" and code or code + 1': "code"}),
    "the short form hides a second attempt": (OVER, "guard/complete", {"and attempts == 1 and taken == 0": ""}),
    "anybody gives back": (OVER, "guard/release", {'state == "p" and owner == ARGV[at]': 'state == "p"'}),
    "what is done is given back": (
        OVER, "guard/release", {
            'state == "p" and owner == ARGV[at]': '(state == "p" and owner == ARGV[at] or state == "d")'}),
    "giving back does not know its copies": (OVER, "guard/release", {
        'state == "r" and owner == ARGV[at]': "false"}),
    "giving back leaves nothing": (
        OVER, "guard/release", {"released, keep, wrote)": "released, 0, wrote)"}),
    "a failure goes to those who did not wait": (SHARE, "guard/claim", {"failure and wait == 2": "failure"}),
    "a caller that waited runs": (SHARE, "guard/claim", {"failure and wait == 2": "false"}),
    "a failure is not kept": (SHARE, "guard/release", {"waited == 1 and ARGV[at + 2]": "false"}),
    "a failure stays when the next run starts": (
        SHARE, "guard/claim", {"now_ms, print, data, span": "now_ms, print, (failure or '') .. data, span"}),
    "what came since is forgotten": (OVER, "guard/forget", {"r.fence ~= tonumber(ARGV[3]) or": ""}),
    "what has ended since is forgotten": (OVER, "guard/forget", {'(state == "p") ~= (ARGV[5] == "1")': "false"}),
    "what is live is forgotten": (OVER, "guard/forget", {'state == "p" and ARGV[4] ~= "1"': "false"}),
    "forgetting does not know its copies": (OVER, "guard/forget", {"if r.owner == request then": "if false then"}),
    "forgetting lets tokens fall": (OVER, "guard/forget", {"request, r.fence,": "request, 0,"}),
    "what came since is decided": (OVER, "guard/resolve", {"r.fence ~= tonumber(ARGV[3])": "false"}),
    "what is live is decided": (OVER, "guard/resolve", {"if left > 0 then": "if false then"}),
    "deciding does not know its copies": (OVER, "guard/resolve", {"if r.owner == request then": "if false then"}),
    "the owner that vanished keeps a say": (OVER, "guard/resolve", {"kind, request,": "kind, r.owner,"}),
    "what may run again is done": (WAIT, "guard/resolve", {'= "r", "", r.data': '= "d", "n", r.data'}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, fault: str) -> None:
    scope, name, changes = FAULTS[fault]
    with pytest.raises(Violation) as found:
        Search(raw, gate, broken(name, changes), **SCOPES[scope]).run(6)
    print(found.value)
    Search(raw, gate, {}, **SCOPES[scope]).follow(found.value.path)  # as it is, the script breaks nothing there
