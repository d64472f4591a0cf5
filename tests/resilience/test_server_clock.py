"""The server's clock jumps, forwards and back: a preloaded library tells the server another time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from idemgate import Gate
from tests.resilience.servers import Jumpy

HOUR = 3_600_000


@pytest.fixture
def server(tmp_path: Path, clock_library: Path) -> Iterator[Jumpy]:
    with Jumpy(tmp_path / "data", clock_library) as made:
        yield made


JUMPS = [-24 * HOUR, -HOUR, -40_000, 15_000, 40_000, HOUR, 24 * HOUR]


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_lengthens_no_lease_and_fences_rise(
    server: Jumpy, namespace: str, jump: int, record_fault: Callable[..., None]
) -> None:
    with Gate(server.url, namespace=namespace) as gate:
        topic = gate.topic("t", lease="30s", backoff=0)
        # Given what is held, done, in flight and scheduled
        silent, done = gate.claim("silent", lease="30s"), gate.claim("done", retention="48h")
        assert done.complete("receipt")
        topic.trigger("flight", 1)
        topic.trigger("later", 1, delay="1h")
        (first,) = topic.take(10)
        # When the clock jumps
        server.jump(jump)
        # Then a lease that has ended by the server's clock is free, and another ends within a whole lease from now on
        again, taken = gate.claim("silent"), {one.key: one for one in topic.take(10)}
        if jump >= 30_000:
            assert again.started
            assert "flight" in taken
        else:
            assert not again.started
            assert 0 < (again.retry_after or 0) <= 30
            assert not taken
            server.jump(jump + 31_000)
            again, taken = gate.claim("silent"), {one.key: one for one in topic.take(10)}
            assert again.started
            assert "flight" in taken
        # And tokens rise, and former owners change nothing
        assert again.token > silent.token
        assert taken["flight"].token > first.token
        assert not silent.complete("stale")
        assert topic.ack(first) == "lost"
        assert topic.ack(taken["flight"]) == "ok"
        # And what is done stays done for its retention, and nothing comes early by the server's clock
        assert gate.claim("done").result == "receipt"
        assert ("later" in taken) == (jump >= HOUR)
        # And new work goes on
        assert gate.claim("new").token > 0
        topic.trigger("flight", 2)
        (last,) = (one for one in topic.take(10) if one.key == "flight")
        assert last.token > taken["flight"].token
    record_fault("the server's clock jumps", 1, promises="P4 P5 P9", fences_not_risen=0)
