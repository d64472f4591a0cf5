"""The pictures of the docs show what the library does."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from idemgate import Gate
from idemgate.core.verdict import Action
from idemgate.testing import Clock
from tools import pictures


def test_the_pictures_of_the_docs_are_current(url: str, namespace: str) -> None:
    drawn = pictures.pictures(url, namespace)
    assert {f"{name}.svg" for name in drawn} == {path.name for path in pictures.FOLDER.iterdir()}
    for name, svg in drawn.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == svg, "run `python -m tools.pictures`"


def test_the_picture_of_an_integration_has_each_action() -> None:
    assert set(pictures.ACTIONS) == set(get_args(Action))


def test_a_key_makes_each_move_of_its_picture(gate: Gate, clock: Clock) -> None:
    made = Moves("absent", lambda key: {"released": "absent"}.get(state := gate.inspect(key).state, state))

    # Given a key that is released, runs again, and is done until it is forgotten
    claim = gate.claim("a")
    made.note("a")
    claim.release()
    made.note("a")
    gate.claim("a").complete()
    made.add("in_progress")
    made.note("a")
    gate.forget("a")
    made.note("a")
    # and one that is taken over
    gate.claim("b")
    made.note("b")
    clock.advance("31s")
    made.note("b")
    claim = gate.claim("b")
    made.note("b")
    claim.release()
    made.note("b")
    # and one that waits for a decision
    gate.claim("c", on_lease_loss="hold")
    made.note("c")
    clock.advance("31s")
    made.note("c")
    gate.resolve("c", done=True, retention="1h")
    made.note("c")
    clock.advance("2h")
    made.note("c")
    # Then these are the moves of the picture
    assert made.moves == {(move.before, move.after) for move in pictures.KEY_MOVES}


def test_a_message_makes_each_move_of_its_picture(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("images", window="1s")

    def state(_: str) -> str:
        stats = topic.stats()
        counts = {name: getattr(stats, name) for name in ("waiting", "scheduled", "ready", "in_flight", "dead")}
        return next((name for name, count in counts.items() if count), "gone")

    made = Moves("none", state)

    # Given a message whose lease ends, and that fails, dies and is redriven
    topic.trigger("cat")
    made.note()
    clock.advance("1s")
    made.note()
    topic.take()
    made.note()
    clock.advance("31s")
    [delivery] = topic.take()  # ready, and in flight again
    made.add("ready", "in_flight")
    topic.nack(delivery, delay="1s")
    made.note()
    clock.advance("1s")
    made.note()
    [delivery] = topic.take()
    made.note()
    topic.bury(delivery)
    made.note()
    topic.dead.redrive()
    made.note()
    [delivery] = topic.take()
    made.note()
    # and a trigger of its key during its last delivery
    topic.trigger("cat")
    made.state = "none"
    made.note()
    topic.ack(delivery)
    made.note()
    clock.advance("1s")
    made.note()
    [delivery] = topic.take()
    made.note()
    topic.ack(delivery)
    made.note()
    # Then these are the moves of the picture
    assert made.moves == {(move.before, move.after) for move in pictures.MESSAGE_MOVES}


class Moves:
    """The moves from one state to the next."""

    def __init__(self, state: str, look: Callable[[str], str]) -> None:
        self.state = state
        self.look = look
        self.moves = set[tuple[str, str]]()

    def add(self, *states: str) -> None:
        for state in states:
            self.moves.add((self.state, state))
            self.state = state

    def note(self, key: str = "") -> None:
        """Add the move to the state that the store shows."""
        self.add(self.look(key))
