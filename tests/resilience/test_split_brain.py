"""Two primaries that do not know of each other: the former one, cut off from its replica, and the replica, which was
told to take its place. A caller of the former one may not have heard of it yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from idemgate import Gate, StoreUnavailable
from idemgate.errors import NotDurable
from tests.cluster import wait_for
from tests.replication import pair


def test_a_primary_that_is_cut_off_is_of_no_use_where_replicas_are_asked_for(
    tmp_path: Path,
    namespace: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    n = min(many(1), 30)  # each waits out its time-out
    with pair(tmp_path / "p") as two:
        old = Gate(two.urls[0], namespace=namespace, durability="replicas", timeout="500ms")
        new = Gate(two.urls[1], namespace=namespace)
        with Gate(two.urls[0], namespace=namespace) as patient:
            patient.claim("done").complete("receipt")
        two.catch_up()
        # Given both as primaries
        two.cut()
        two.promote()
        for key in map(str, range(n)):
            # When the former one is asked for what counts, then it refuses
            for ask in (
                lambda key=key: old.claim(key),
                lambda key=key: old.first(key, "1h"),
                lambda key=key: old.topic("t").trigger(key, 1),
            ):
                with pytest.raises(NotDurable):
                    ask()
            # And nobody holds the key there, while the other one grants it
            assert old.inspect(key).state in ("absent", "released")
            assert new.claim(key).complete("receipt")
        # And what both had is done on both
        assert [gate.inspect("done").state for gate in (old, new)] == ["done", "done"]
        for gate in (old, new):
            gate.close()
            sound(gate)
    record_fault("split brain, durability=replicas", 3 * n, promises="P1", granted_twice=0)


def test_without_it_both_grant_and_the_later_token_is_higher(
    tmp_path: Path,
    namespace: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    keys = [*map(str, range(many(10)))]
    with pair(tmp_path / "p") as two:
        old, new = (Gate(url, namespace=namespace) for url in two.urls)
        two.cut()
        two.promote()
        # Given two primaries, when both are asked for the same keys, then both grant them
        former, latter = ([gate.claim(key) for key in keys] for gate in (old, new))
        assert all(claim.started for claim in [*former, *latter])
        # And the later owner has the higher token, so a fence that has seen it refuses the former owner
        assert all(one.token < other.token for one, other in zip(former, latter, strict=True))
        for gate in (old, new):
            gate.close()
            sound(gate)
    record_fault("split brain", len(keys), promises="P4", granted_twice=len(keys), fences_not_risen=0)


def test_min_replicas_to_write_ends_what_a_primary_does_that_is_cut_off(
    tmp_path: Path, namespace: str, sound: Callable[[Gate], None], record_fault: Callable[..., None]
) -> None:
    with pair(tmp_path / "p", "--min-replicas-to-write", "1", "--min-replicas-max-lag", "1") as two:
        old, new = (Gate(url, namespace=namespace, timeout="500ms") for url in two.urls)
        assert old.claim("before").started
        # Given a primary that must not write alone, and is cut off for longer than its replicas may lag
        two.cut()
        two.promote()
        wait_for(lambda: two.primary.info("replication")["min_slaves_good_slaves"] == 0)
        # When it is asked without any durability, then nothing is done there
        with pytest.raises(StoreUnavailable, match="NOREPLICAS") as refused:
            old.claim("k")
        assert refused.value.executed == "no"
        assert old.inspect("k").state == "absent"
        assert new.claim("k").started
        for gate in (old, new):
            gate.close()
            sound(gate)
    record_fault("split brain, min-replicas-to-write 1", 1, promises="P1", granted_twice=0)
