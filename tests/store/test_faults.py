"""How long a call is tried."""

from __future__ import annotations

import pytest
import redis.exceptions as rx

from idemgate.errors import StoreUnavailable
from idemgate.store.retry import RetryBudget


def test_pauses_stay_short_however_often_a_call_was_tried() -> None:
    # Given a call that is tried for longer than a thousand pauses take, as a settlement of a long lease is
    budget = RetryBudget(86_400)
    # Then each pause is at most half a second
    assert all(0 <= budget.next_delay(rx.ConnectionError("gone")) <= 0.5 for _ in range(3000))


def test_nobody_is_told_that_nothing_was_done_where_a_part_was() -> None:
    # Given a server that refused to write, now, for a while
    refusal = rx.ReadOnlyError("READONLY")
    # Then what was asked first was certainly not done, and what was asked after a part of it may have been
    whole, begun = RetryBudget(0), RetryBudget(0)
    begun.mark_partial()
    for budget, executed in ((whole, "no"), (begun, "unknown"), (whole.renew(), "unknown")):
        with pytest.raises(StoreUnavailable) as told:
            budget.next_delay(refusal)
        assert told.value.executed == executed


def test_each_further_call_has_the_whole_time() -> None:
    late = RetryBudget(60, started=-1e9)
    assert late.remaining == 0
    assert 0 < late.renew().remaining <= 60
