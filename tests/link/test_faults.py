"""How long a call is tried."""

from __future__ import annotations

import redis.exceptions as rx

from idemgate.link.faults import Patience


def test_pauses_stay_short_however_often_a_call_was_tried() -> None:
    # Given a call that is tried for longer than a thousand pauses take, as a settlement of a long lease is
    patience = Patience(86_400)
    # Then each pause is at most half a second
    assert all(0 <= patience.pause(rx.ConnectionError("gone")) <= 0.5 for _ in range(3000))
