"""A test of a burst: 40 triggers of a key become one delivery when their window ends.

python example.py        runs pytest on this file
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from idemgate.testing import assert_merged, drain

if TYPE_CHECKING:
    from idemgate import Gate
    from idemgate.testing import Clock


def test_a_burst_becomes_one_delivery(idemgate_gate: Gate, idemgate_clock: Clock) -> None:
    images = idemgate_gate.topic("images", window="2s")
    delivered: list[int] = []
    images.handler(lambda delivery: delivered.append(delivery.count))
    images.trigger_many([("cat.png", n) for n in range(40)])
    assert_merged(images, "cat.png", triggers=40)
    assert drain(idemgate_gate).delivered == 0
    idemgate_clock.advance("2s")
    assert drain(idemgate_gate).delivered == 1
    assert delivered == [40]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
