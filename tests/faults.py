"""Faults to put into the scripts: tests show that they would find them.

A line of a script that a fault changes ends with a marker, `-- fault: claim-copy`. The scripts that are sent to a
server have no markers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from idemgate import lua

__all__ = ["FAULTS", "Fault", "broken", "spoil"]

MARKER = re.compile(r"^(.+?)(?: -- (?!fault: )[^\n]*)? -- fault: ([\w-]+)$", re.MULTILINE)


class Fault(NamedTuple):
    """A change of the line with this marker.

    `change`: "never": its condition is false. "nothing": it assigns nil. "gone": the line is not there. "first X": the
    statement X comes before it. "A => B": B stands for A, which occurs there once.
    """

    marker: str
    change: str

    def applied(self, line: str) -> str:
        """Return the line with the fault. Raises ValueError if it cannot have it."""
        indent = line[: len(line) - len(line.lstrip())]
        if self.change == "never":
            changed, times = re.subn(r"^( *(?:(?:else)?if|while)) .+ (then|do)$", r"\1 false \2", line)
        elif self.change == "nothing":
            changed, times = re.subn(r" = .+$", " = nil", line)
        elif self.change == "gone":
            changed, times = "", 1
        elif self.change.startswith("first "):
            changed, times = f"{indent}{self.change.removeprefix('first ')}; {line.lstrip()}", 1
        else:
            before, _, after = self.change.partition(" => ")
            words = re.escape(before)
            words = (r"\b" if before[0].isalnum() else "") + words + (r"\b" if before[-1].isalnum() else "")
            changed, times = re.subn(words, lambda _: after, line)
        if times != 1 or changed == line:
            raise ValueError(f"{self.marker}: {self.change!r} fits {times} times: {line.strip()}")
        return changed


def broken(name: str, fault: str) -> str:
    """Return the text of a script with this fault. Raises ValueError unless one line of its files has the marker."""
    return spoil(lua.expand(name), fault)


def spoil(text: str, fault: str) -> str:
    """Return the text of a file with this fault. Raises ValueError unless one line has the marker."""
    wanted, lines = FAULTS[fault], set[str]()

    def changed(found: re.Match[str]) -> str:
        if found[2] != wanted.marker:
            return found[0]
        lines.add(found[0])
        return wanted.applied(found[1])

    spoilt = MARKER.sub(changed, text)
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines have the marker {wanted.marker}")
    return spoilt


FAULTS = {
    # of a claim
    "a claim does not look at the lease": Fault("lease-runs", "never"),
    "a claim does not know its copies": Fault("claim-copy", "never"),
    "tokens do not rise": Fault("grant", "fence(last, now_us) => now_us"),
    "tokens stand still": Fault("grant", "fence(last, now_us) => 1"),
    "a lost lease is not counted": Fault("grant", "taken + 1 => taken"),
    "attempts are not counted": Fault("grant", "attempts + 1 => 1"),
    "an owner that vanished is not waited for": Fault("vanished-owner", "never"),
    "what is done is free": Fault("done-again", 'kind ~= "" => state == "f"'),
    "what is done stays so for ever": Fault("record-lasts", "never"),
    "the lease that is left is more": Fault("busy-until", "left => left + 1"),
    "a failure goes to those who did not wait": Fault("failure-shared", "wait == 2 => true"),
    "a caller that waited runs": Fault("failure-shared", "never"),
    "a failure stays when the next run starts": Fault("begun", 'data => (failure or "") .. data'),
    # of records of plain commands
    "records of plain commands are unknown": Fault(
        "plain-record", "code == 192 or code and code >= 245 => code and code == 0"
    ),
    "the lease of a plain claim never ends": Fault("plain-claim", "begun + lease => expires"),
    "a plain claim has no token": Fault("plain-claim", "begun * 1000 => 0"),
    "a plain claim belongs to all": Fault("plain-claim", '"p", "", owner => "p", "", ""'),
    "an owner of a plain claim that vanished is not waited for": Fault("plain-claim", "flags % 2 => 0"),
    "what a plain command completed is done for ever": Fault(
        "plain-done", "fence, 1, 0, expires, => fence, 1, 0, 2 * expires,"
    ),
    "what a plain command completed is free": Fault("plain-done", "1, 0, expires, => 1, 0, 0,"),
    "what a plain command completed has no token": Fault("plain-done", "fence, 1 => 0, 1"),
    "a plain mark belongs to all": Fault("plain-mark", '"n", owner => "n", ""'),
    "a plain mark has no token": Fault("plain-mark", "begun * 1000 => 0"),
    "what a plain mark says is free": Fault("plain-mark", "1, 0, expires => 1, 0, 0"),
    # of a heartbeat and a checkpoint
    "a former owner beats": Fault("renew-owner", "r.owner ~= id => false"),
    "a heartbeat revives what has ended": Fault("renew-owner", "or => and false or"),
    "a heartbeat says lost, and holds": Fault("renewed", '"ok" => "lost"'),
    "a former owner notes": Fault("note-owner", "r.owner ~= id => false"),
    # of a completion
    "anybody completes": Fault("completes", " and owner == ARGV[at] and granted => "),
    "what an earlier grant did completes a later one": Fault("completes", " and granted => "),
    "what was given back is completed": Fault("completes", 'state == "p" => (state == "p" or state == "r")'),
    "a lease that lapsed cannot be completed": Fault("completes", "granted => granted and ends > now_ms"),
    "a copy of a completion lasts longer": Fault("completes", 'then => or had ~= "" and owner == "" and granted then'),
    "a completion does not know its copies": Fault("completion-copy", "never"),
    "each completed run belongs to the caller": Fault("completion-copy", " and granted => "),
    "what was decided was done by the owner that vanished": Fault("completion-copy", ' and owner == "" => '),
    "what is done loses its fingerprint": Fault("done-record", 'print => ""'),
    "what is done loses its result": Fault("done-record", 'ARGV[at + 3] => ""'),
    "what is done is kept for no time": Fault("done-record", "span => 1"),
    "the short form does not say that a fingerprint follows": Fault("short-print", "code + 1 => code"),
    "the short form hides a second attempt": Fault("short-form", "attempts == 1 => true"),
    "the long form says all": Fault("short-form", "never"),
    # of a release
    "anybody gives back": Fault("releases", " and owner == ARGV[at] => "),
    "what is done is given back": Fault("releases", 'then => or state == "d" then'),
    "what is given back is done": Fault("released", '"r", "" => "d", "n"'),
    "giving back does not know its copies": Fault("release-copy", "never"),
    "giving back leaves nothing": Fault("tombstone", "keep => 0"),
    "a failure is not kept": Fault("failure-kept", "waited == 1 => false"),
    # of operators
    "what came since is forgotten": Fault("forget-seen", "or => and false or"),
    "what has ended since is forgotten": Fault("forget-seen", "or => or false and"),
    "what is live is forgotten": Fault("forget-live", "never"),
    "a young claim is forgotten at once": Fault("forget-early", "never"),
    "a young claim is forgotten at once, if another caller waits": Fault(
        "forget-early", 'r.fence % 1000 == 0 => string.byte(redis.call("GET", key)) == 192'
    ),
    "forgetting does not know its copies": Fault("forget-copy", "never"),
    "forgetting lets tokens fall": Fault("forgotten", "r.fence => 0"),
    "what came since is decided": Fault("resolve-seen", "never"),
    "what is live is decided": Fault("resolve-live", "never"),
    "deciding does not know its copies": Fault("resolve-copy", "never"),
    "the owner that vanished keeps a say": Fault("resolved", "request => r.owner"),
    "a decision has no owner": Fault("resolved", 'request => ""'),
    "what may run again is done": Fault("retry-allowed", '"r", "" => "d", "n"'),
    # of a trigger
    "a key in flight is scheduled": Fault("in-flight", "not in_flight[key] and => "),
    "a trigger is not remembered": Fault("trigger-copy", "never"),
    # of a take
    "two of a millisecond are more than can be ordered": Fault("most-ordered", "128 => 1"),
    "a take is not remembered": Fault("take-copy", "never"),
    "tokens of deliveries do not rise": Fault("take-token", "fence(last, now_us) => now_us"),
    "what was not heard of is not taken again": Fault("take-again", "never"),
    "a group is never full": Fault("group-full", "never"),
    "a lease ends where it starts": Fault("lease-term", "K.term => 0"),
    "a delivery of a group is stored as a plain one": Fault("plain", "not plain or => "),
    "leases lapse at once": Fault("lapse-time", 'until_now => "+inf"'),
    "what lapses is lost": Fault("lapse-requeue", "gone"),
    "what lapses has another name": Fault("lapse-requeue", "first m.serial = m.serial + 1"),
    "what was joined keeps its name": Fault(
        "merged-count", "old.count = old.count + new.count => new.last, new.serial = old.last, old.serial"
    ),
    # of a settlement
    "an ending needs no token": Fault("settle-token", "~= tokens[i] => == nil"),
    "a plain ack needs no token": Fault("ack-token", "token ~= tokens[i] => not token"),
    "an ending keeps its group": Fault("settle-group", "gone"),
    "what is behind is forgotten": Fault("next-kept", "gone"),
    "what was cancelled is tried again": Fault("settle-cancelled", "never"),
    "attempts of a message are not counted": Fault("attempt-counted", "gone"),
    "what is buried is tried again": Fault("buried", "never"),
    "what is given back was tried": Fault("given-back", "never"),
    "what is put off has another name": Fault("put-off", "first m.last = m.last + 1"),
    "what is put off was tried": Fault("put-off", "first m.attempts = m.attempts + 1"),
    "what was not heard of ends twice": Fault("settle-copy", "nothing"),
    "a turn ends anew what it ended": Fault("turn-copy", "nothing"),
    "a copy of a turn takes more": Fault("turn-takes", "not known_reply => true"),
    # of other scripts of a topic
    "what is cancelled stays scheduled": Fault("cancel-scheduled", "unschedule(K, key, m) => nil"),
    "what is cancelled in flight goes on": Fault("cancel-running", "true => false"),
    "what is buried by its key is gone": Fault("buried-key", "gone"),
    "what runs is cancelled with what is buried": Fault("bury-running", " and not failure => "),
    "anybody extends": Fault("extend-token", " and d.token == tokens[i] => "),
    "a heartbeat holds nothing": Fault("moved", "#starts => 0"),
    "an extended lease forgets its token": Fault("moved", "#added => 0"),
    "another time is not gone by": Fault("reschedule-passed", "never"),
    "another time is not a caller's": Fault("reschedule-time", "1 => 0"),
    "what was asked before is not known": Fault("early-copy", "nothing"),
    "there is another counter": Fault("counted", "first done.of_another_version = 1"),
    "a letter stays": Fault("letter-gone", "gone"),
    "what is redriven is at its end": Fault("redriven", "gone"),
    "what is deleted is not counted": Fault("deleted-count", "deleted_triggers = triggers => "),
}
