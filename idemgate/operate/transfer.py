"""Plans about all pending messages of a topic: list them page by page, or move them to another topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from idemgate.core.calls import Plan, run_call, run_calls
from idemgate.core.validation import MOST
from idemgate.errors import TopicInUse
from idemgate.topics.dead_letters import PAGE, DeadFilter, DeadLetter, DeadPosition
from idemgate.topics.messages import PendingMessage, PendingPage, Position
from idemgate.topics.slots import SlotsChanged
from idemgate.topics.topic_calls import TopicCalls

__all__ = ["Transferred", "keep_dead_letters", "plan_messages", "plan_transfer"]

_ROUNDS = 20
"""The most rounds of calls for a page. Many deliveries may have no message behind them."""
_CLOCKS = 60_000
"""Ms by which the clocks of the nodes of a cluster may differ."""


def plan_messages(calls: TopicCalls, after: Position, n: int) -> Plan[PendingPage]:
    """Plan the reading of pending messages of all slots after a position: about `n`, the same ones for any layout.

    Messages that share a position, because the key is in several groups, are in one page. Raises TopicInUse.
    """
    found, now_ms = list[PendingMessage](), 0
    for _ in range(_ROUNDS):
        answers = yield from run_calls(calls.messages(slot, after, min(n, PAGE)) for slot in range(calls.policy.slots))
        if moved := [one for one in answers if isinstance(one, SlotsChanged)]:
            calls = moved[0].calls
            continue
        pages: list[PendingPage] = answers
        # What is beyond the end of one page may follow messages of that slot which are not read yet.
        end, now_ms = min((page.next for page in pages if page.next), default=None), pages[0].now_ms
        known = [one for page in pages for one in page.messages if end is None or one.position <= end]
        found += sorted(known, key=lambda one: one.position)
        if len(found) >= n or end is None:
            return _cut_page(found, n, end, now_ms)
        after = end
    if not now_ms:
        raise _changing(calls.name)
    return _cut_page(found, n, after, now_ms)


def _cut_page(found: list[PendingMessage], n: int, end: Position | None, now_ms: int) -> PendingPage:
    while 0 < n < len(found) and found[n].position == found[n - 1].position:
        n += 1
    return PendingPage(found[:n], found[n - 1].position if len(found) > n else end, now_ms)


# -- moving -----------------------------------------------------------------------------------------------------------


class Transferred(NamedTuple):
    """The messages that a transfer moved, and those that it dropped: a later trigger there had a higher version."""

    moved: int
    dropped: int


def keep_dead_letters(calls: TopicCalls) -> TopicCalls:
    """Return calls that discard no dead letters. A caller who did not declare the topic does not know its limits."""
    policy = replace(calls.policy, max_dead_letters=MOST, dead_retention=MOST)
    return calls.for_policy(policy, policy.slots)


def plan_transfer(
    source: TopicCalls, to: TopicCalls, reason: str, on_progress: Callable[[Transferred], object]
) -> Plan[Transferred]:
    """Plan the move of the pending messages of a topic to another one with the same merge policy.

    A message is first made a dead letter with this reason: nothing merges with it then. The other topic adopts the
    letter, and the first one deletes it. A plan that is interrupted leaves such letters. The next plan with the same
    reason begins with them. The other topic remembers each for a day at least, so none is adopted twice. It adopts no
    letter that has no room in the pending message of its key. Such a letter stays, too.

    Deliveries, and the messages behind them, are left. So are messages that are triggered after it began.

    Raises TopicInUse or DecodeError.
    """
    move = _Transfer(keep_dead_letters(source), to, reason, on_progress)
    for slot in range(source.policy.slots):
        yield from move.move_slot(slot)
    return move.done


class _Transfer:
    def __init__(
        self, source: TopicCalls, to: TopicCalls, reason: str, on_progress: Callable[[Transferred], object]
    ) -> None:
        self._source = source
        self._to = to
        self._reason = reason
        self._on_progress = on_progress
        self._full = set[str]()
        """The ids of letters that have no room in the other topic."""
        self.done = Transferred(0, 0)

    def move_slot(self, slot: int) -> Plan[None]:
        yield from self._move_letters(slot, 0)  # of a transfer that was interrupted
        after: Position | None = Position()
        began_ms = 0
        while after is not None:
            page = self._unless_moved((yield from run_call(self._source.messages(slot, after, PAGE))))
            began_ms = began_ms or page.now_ms
            yield from run_calls(
                self._source.bury(one.raw_key, one.message.raw_group or None, self._reason)
                for one in page.messages if one.state != "waiting" and one.message.first_ms <= began_ms
            )  # fmt: skip
            yield from self._move_letters(slot, began_ms - _CLOCKS)
            after = page.next

    def _move_letters(self, slot: int, since_ms: int) -> Plan[None]:
        wanted = DeadFilter(reason=self._reason, since=since_ms)
        at: DeadPosition | None = wanted.before
        while at is not None:
            page = self._unless_moved((yield from run_call(self._source.dead(slot, wanted, PAGE, at))))
            letters = [one for one in page.letters if one.reason == self._reason and one.id not in self._full]
            adopted = 0
            while letters:
                count, letters = yield from self._adopt(slot, letters)
                adopted += count
            if not adopted:
                at = page.next

    def _adopt(self, slot: int, letters: Sequence[DeadLetter]) -> Plan[tuple[int, list[DeadLetter]]]:
        """Let the other topic adopt letters, and delete them here. Return how many, and those left for later."""
        batch = self._to.adopt_letters(self._source.name, [one.stored for one in letters])
        words = batch.join((yield from run_calls(batch.calls)))
        answers = [*zip(letters, words, strict=True)]
        numbers = [one.id.partition("-")[2] for one, word in answers if word not in ("left", "full")]
        if numbers:  # without any, the oldest letters would be deleted
            self._unless_moved((yield from run_call(self._source.take_dead(slot, "delete", numbers))))
        moved = words.count("scheduled") + words.count("merged")
        self.done = Transferred(self.done.moved + moved, self.done.dropped + words.count("dropped"))
        self._on_progress(self.done)
        self._full.update(one.id for one, word in answers if word == "full")
        return len(numbers), [one for one, word in answers if word == "left"]

    def _unless_moved(self, answer: Any) -> Any:
        if isinstance(answer, SlotsChanged):
            raise _changing(self._source.name)
        return answer


def _changing(name: str) -> TopicInUse:
    return TopicInUse(name, "its number of slots is being changed. Repeat the call after the change")
