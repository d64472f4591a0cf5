"""What a member holds and asks for next, whatever the answers are."""

from __future__ import annotations

from math import ceil

from idemgate.membership.ownership import LIMIT, HeartbeatReply, HeartbeatRequest, Slot, SlotOwnership

ME, YOU = "me", "you"
T = frozenset({"t"})


def answered(holdings: SlotOwnership, held_by_you: set[Slot], generation: int = 1, now: float = 0) -> HeartbeatRequest:
    """One announcement, answered by a store in which `you` hold some slots and I get the others."""
    said = holdings.next_request(now)
    holders = {
        slot: YOU if slot in held_by_you and slot not in said.taken_over else ME
        for slot in said.taken_over + said.wanted
    }
    known = generation == said.generation
    holdings.apply_reply(said, HeartbeatReply(generation, None if known else {ME: T, YOU: T}, holders), now)
    return said


def answered_more(holdings: SlotOwnership, held_by_you: set[Slot]) -> bool:
    """As `answered`, of the generation that is known; whether there is more to say."""
    said = holdings.next_request(0)
    return holdings.apply_reply(
        said, HeartbeatReply(1, None, {slot: YOU if slot in held_by_you else ME for slot in said.wanted}), 0
    )


def joined(slots: int = 16, elsewhere: int = 0) -> SlotOwnership:
    """A member that knows its share and asked for it once, at 100 ms; the first slots of it are in other hands."""
    holdings = SlotOwnership(ME, {"t": slots}, grace=1000)
    answered(holdings, set())
    assert elsewhere < len(holdings.share) < slots
    answered(holdings, set(sorted(holdings.share)[:elsewhere]), now=100)
    return holdings


def test_it_asks_for_nothing_before_it_knows_the_members() -> None:
    holdings = SlotOwnership(ME, {"t": 16}, grace=1000)
    assert answered(holdings, set()).wanted == ()
    # When it knows them, it asks for its share, and holds what it got; and does not ask again
    assert set(answered(holdings, set()).wanted) == holdings.share == holdings.held == holdings.assigned_slots
    assert answered(holdings, set()).wanted == ()


def test_a_slot_in_other_hands_is_waited_for_then_seized() -> None:
    # Given a slot of my share that another member holds
    holdings = joined(elsewhere=1)
    (slot,) = holdings.share - holdings.held
    assert holdings.takes_over_at == 1100
    # When it is asked for again before the grace time is over, it is only wanted
    said = answered(holdings, {slot}, now=1099.9)
    assert (said.taken_over, said.wanted) == ((), (slot,))
    # Then it is seized, once
    assert answered(holdings, {slot}, now=1100).taken_over == (slot,)
    assert slot in holdings.assigned_slots
    assert holdings.takes_over_at == float("inf")
    assert answered(holdings, set(), now=9999).taken_over == ()


def test_many_slots_are_asked_for_in_parts_that_follow_at_once() -> None:
    # Given a share of more slots than one announcement asks for, of which I get none
    holdings = SlotOwnership(ME, {"t": 4096}, grace=1000)
    everything = {("t", number) for number in range(4096)}
    answered(holdings, set())
    parts: list[set[Slot]] = []
    more = True
    while more:
        said = holdings.next_request(0)
        parts.append(set(said.wanted))
        more = holdings.apply_reply(said, HeartbeatReply(1, None, dict.fromkeys(said.wanted, YOU)), 0)
    # Then each is asked for, in as few parts as it takes, and then there is a pause
    assert set().union(*parts) == holdings.share
    assert len(parts) == ceil(len(holdings.share) / LIMIT) > 3
    assert max(map(len, parts)) == LIMIT
    # And later they are seized, in parts, too
    taken_over = [answered(holdings, everything, now=1000).taken_over for _ in parts]
    assert sum(map(len, taken_over)) == len(set().union(*taken_over)) == len(holdings.share)
    assert holdings.assigned_slots == holdings.share
    # And let go, in parts
    holdings.leave()
    holdings.release(everything)
    released = [answered(holdings, set()).released for _ in parts]
    assert sum(map(len, released)) == len(set().union(*released)) == len(set().union(*parts))
    assert answered(holdings, set()).released == ()


def test_many_slots_that_become_free_are_taken_without_a_pause() -> None:
    # Given a share of more slots than one announcement asks for, all of it in other hands
    holdings = SlotOwnership(ME, {"t": 4096}, grace=1000)
    everything = {("t", number) for number in range(4096)}
    answered(holdings, set())
    while answered_more(holdings, everything):
        pass
    assert holdings.assigned_slots == set()
    # When they are let go
    turns = 1
    while answered_more(holdings, set()):
        turns += 1
    # Then one announcement follows the other until it has them all
    assert holdings.assigned_slots == holdings.share
    assert turns <= ceil(len(holdings.share) / LIMIT) + 1
    assert not answered_more(holdings, set())


def test_after_its_time_has_passed_nothing_is_assigned_before_the_store_says_so() -> None:
    holdings = joined()
    before = holdings.assigned_slots
    lost = min(before)
    # When others may have taken everything
    holdings.doubt()
    assert holdings.assigned_slots == set()
    # Then it is asked for anew, and what others took is waited for
    assert set(answered(holdings, {lost}).wanted) == before
    assert holdings.assigned_slots == before - {lost}


def test_what_is_let_go_is_said_until_it_was_heard() -> None:
    holdings = joined()
    holdings.leave()
    slot = next(iter(holdings.held))
    # When it is let go, and the first announcement of it goes unheard
    assert holdings.release([slot])
    assert not holdings.release([slot])
    said = holdings.next_request(0)
    holdings.mark_unanswered(said)
    # Then it is said again, until heard
    assert answered(holdings, set()).released == said.released == (slot,)
    assert answered(holdings, set()).released == ()


def test_what_an_unheard_announcement_may_have_taken_is_let_go_once_it_is_not_wanted() -> None:
    # Given a slot that was asked for, with no answer
    holdings = joined(elsewhere=1)
    (slot,) = holdings.share - holdings.held
    said = holdings.next_request(0)
    assert said.wanted == (slot,)
    holdings.mark_unanswered(said)
    # When it is not in the share any more
    holdings.leave()
    # Then it is let go, for it may be in our hands; what is held and drained is not
    assert answered(holdings, {slot}).released == (slot,)
    assert answered(holdings, {slot}).released == ()


def test_a_slot_that_begins_to_leave_while_it_is_asked_for_is_drained_not_waited_for() -> None:
    holdings = joined(elsewhere=2)
    one, two = sorted(holdings.share)[:2]
    said = holdings.next_request(0)
    # When it leaves between the question and the answer
    holdings.leave()
    holdings.apply_reply(said, HeartbeatReply(1, None, {one: ME, two: YOU}), 0)
    # Then what it got is held, to be drained, and what it did not get is not seized later
    assert one in holdings.held
    assert two not in holdings.held
    assert holdings.next_request(10_000).taken_over == ()


def test_the_wait_begins_anew_when_the_members_change() -> None:
    # Given a slot that was waited for almost long enough
    holdings = joined(elsewhere=1)
    (slot,) = holdings.share - holdings.held
    # When the members change, and it is still in other hands
    answered(holdings, {slot}, generation=2, now=1000)
    assert answered(holdings, {slot}, generation=2, now=1050).taken_over == ()
    # Then it is seized a whole grace time after that was heard
    assert answered(holdings, {slot}, generation=2, now=2049).taken_over == ()
    assert answered(holdings, {slot}, generation=2, now=2050).taken_over == (slot,)


def test_a_slot_that_comes_back_while_it_is_drained_is_taken_from_once_the_store_says_so() -> None:
    # Given a member alone, and a second one that takes over a part
    holdings = SlotOwnership(ME, {"t": 16}, grace=1000)
    alone, both = {ME: T}, {ME: T, YOU: T}

    def told(generation: int, members: dict[str, frozenset[str]] | None, holder: str = ME) -> None:
        said = holdings.next_request(0)
        holdings.apply_reply(said, HeartbeatReply(generation, members, dict.fromkeys(said.wanted, holder)), 0)

    told(1, alone)
    told(1, None)
    everything = holdings.assigned_slots
    told(2, both)
    draining = holdings.draining
    assert draining
    # When the second one goes, what was drained is not taken from before the store was asked: it may have been seized
    told(3, alone)
    assert holdings.assigned_slots == everything - draining
    assert holdings.draining == set()
    told(3, None)
    assert holdings.assigned_slots == everything == {("t", number) for number in range(16)}


def test_the_first_wait_that_ends_is_when_something_is_seized() -> None:
    # Given slots in other hands, of which the second part is asked for a while after the first
    holdings = SlotOwnership(ME, {"t": 4 * LIMIT}, grace=1000)
    answered(holdings, set())
    all_of_it = set(holdings.share)
    assert len(all_of_it) > LIMIT
    answered(holdings, all_of_it, now=100)
    answered(holdings, all_of_it, now=600)
    # Then the first part is seized when its own wait ends
    assert holdings.takes_over_at == 1100


def test_who_leaves_says_that_it_serves_nothing() -> None:
    holdings = joined()
    assert holdings.next_request(0).topics == ("t",)
    holdings.leave()
    assert holdings.next_request(0).topics == ()
    assert (holdings.share, holdings.draining) == (frozenset(), frozenset(holdings.held))


def test_what_is_seized_and_wanted_is_together_no_more_than_may_be_asked_for() -> None:
    # Given as many slots as may be asked for in other hands, and as many more that nobody was asked about
    holdings = SlotOwnership(ME, {"t": 4 * LIMIT}, grace=1000)
    answered(holdings, set())
    answered(holdings, holdings.share, now=100)
    assert len(holdings.share) > LIMIT
    # When some of those may be seized
    said = holdings.next_request(1100)
    assert 0 < len(said.taken_over) <= LIMIT
    assert len(said.taken_over) + len(said.wanted) == LIMIT
