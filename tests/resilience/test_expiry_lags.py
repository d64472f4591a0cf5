"""Keys whose time has come, but which the server has not removed yet (`DEBUG SET-ACTIVE-EXPIRE 0`): what is remembered
is forgotten when it was said, whether or not its key is still there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from tests.cluster import wait_for
from tests.resilience.servers import DEBUG, Jumpy

MINUTE = 60_000


@pytest.fixture
def server(tmp_path: Path, clock_library: Path) -> Iterator[Jumpy]:
    with Jumpy(tmp_path / "data", clock_library, *DEBUG) as made:
        yield made


def test_answers_are_the_same_whether_keys_are_removed_at_once_or_never(
    server: Jumpy,
    namespace: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    n, answers = many(5), []
    for removes in (1, 0):
        # Given a server that removes what has expired, and one that does not
        server.jump(0)
        server.client.execute_command("DEBUG", "SET-ACTIVE-EXPIRE", removes)
        with Gate(server.url, namespace=f"{namespace}-{removes}") as gate:
            said = [remembered(gate, key) for key in map(str, range(n))]
            # When retentions, windows and leases end, one after the other
            for minutes in (3, 7, 15, 40):
                server.jump(minutes * MINUTE)
                said += [remembered(gate, key) for key in map(str, range(n))]
            server.jump(80 * MINUTE)
            wait_for(lambda removes=removes: (gone_but_there(server.client) == 0) == removes)
            said += [remembered(gate, key) for key in map(str, range(n))]
            sound(gate)
        answers.append(said)
        # Then what was to be remembered for five or ten minutes is, and no longer
        for what, expected in FORGOTTEN.items():
            for key in range(n):
                assert [said[time * n + key][what] for time in range(6)] == expected, (removes, what, key)
    # And both answer the same
    assert answers[0] == answers[1]
    record_fault("keys that have expired are still there", 6 * n, promises="P2 P6", other_answers=0)


FORGOTTEN = {
    2: [True, False, True, True, True, True],  # first, five minutes: asked at 0, 3, 7, 15, 40 and 80
    3: [True, False, True, True, True, True],  # dedup.add, five minutes
    4: [True, False, False, True, True, True],  # dedup.get_or_set, ten minutes
}
"""Whether each answer of `remembered` was the first of its time."""


def gone_but_there(client: Any) -> int:
    """How many keys the server holds that it does not show any more."""
    return int(client.dbsize()) - len(client.keys("*"))


def remembered(gate: Gate, key: str) -> list[Any]:
    """What is answered about a key, by everything that is forgotten after five or ten minutes."""
    topic = gate.topic("t", lease="5m", backoff=0, max_attempts=2)
    claim = gate.claim(key, lease="5m", retention="10m")
    if claim.started and claim.attempt == 1 and int(key) % 2:
        claim.complete("receipt")
    return [
        (claim.state, claim.attempt, claim.result if claim.state == "done" else None),
        gate.inspect(key).state,
        gate.first(key, "5m"),
        gate.dedup("s", "5m").add(key),
        gate.dedup("s", "10m").get_or_set(key, "value").first,
        topic.trigger(key, 1, event_id=key).status,
        [(one.key, one.attempt) for one in topic.take(1)],
    ]
