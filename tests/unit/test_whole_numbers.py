"""Every option that is a whole number refuses all else, before anything is written: with its name, value and fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Adaptive, Gate, InvalidArgument, append, union
from idemgate.gate import LARGEST
from idemgate.guard.options import ClaimOptions, GuardOptions
from idemgate.testing import audit
from idemgate.topics.policy import TopicOptions
from tests.for_each import for_each

NOWHERE = "redis://nowhere:1"
gate = Gate(NOWHERE, timeout="1ms")


def work(k: str) -> None: ...


BESIDE: dict[str, dict[str, Any]] = {
    "max_size": {"window": "1s"},
    "burst": {"rate": "1/s"},
    "retry_penalty": {"priority": True},
}
"""The options that another one needs."""
SMALLEST = {"topic.history": (64, 1000), "once.history": (64, 1000)}
"""The options whose smallest number is not 1."""
PLACES: dict[str, Callable[[Any], object]] = {
    "Gate.max_bytes": lambda value: Gate(NOWHERE, max_bytes=value),
    "Gate.durability": lambda value: Gate(NOWHERE, durability=value),
    "worker.concurrency": lambda value: gate.aio.worker("t", concurrency=value),
    "worker.prefetch": lambda value: gate.aio.worker("t", prefetch=value),
    "subscribe.concurrency": lambda value: gate.subscribe("c", concurrency=value)(work),
    "subscribe.backlog": lambda value: gate.subscribe("c", backlog=value)(work),
    "consume_list.concurrency": lambda value: gate.consume_list("l", concurrency=value)(work),
    "consume_list.max_deliveries": lambda value: gate.consume_list("l", max_deliveries=value)(work),
    "consume_list.max_dead_letters": lambda value: gate.consume_list("l", max_dead_letters=value)(work),
    "stream.concurrency": lambda value: gate.stream("s", group="g", concurrency=value)(work),
    "stream.max_deliveries": lambda value: gate.stream("s", group="g", max_deliveries=value)(work),
    "stream.max_dead_letters": lambda value: gate.stream("s", group="g", max_dead_letters=value)(work),
    "on_expired.backlog": lambda value: gate.on_expired("sessions", "s:*", backlog=value),
    "Adaptive.least": lambda value: Adaptive(least=value),
    "Adaptive.most": lambda value: Adaptive(most=value),
    "append.cap": append,
    "union.cap": union,
    "take.n": lambda value: gate.topic("t").take(value),
    "forward_once.n": lambda value: gate.topic("f").forward_once(value),
    "forward.keep": lambda value: gate.topic("f").forward("list", keep=value),
    "dead.list.n": lambda value: gate.topic("t").dead.list(value),
    "dead.list.skip": lambda value: gate.topic("t").dead.list(1, skip=value),
    "dead.redrive.limit": lambda value: gate.topic("t").dead.redrive(limit=value),
    "dead.delete.limit": lambda value: gate.topic("t").dead.delete(limit=value),
    "reshard.slots": lambda value: gate.topic("t").reshard(value),
    "audit.most": lambda value: audit(NOWHERE, most=value),
    "audit.most_bytes": lambda value: audit(NOWHERE, most_bytes=value),
}


def of_types(options: Any) -> list[str]:
    """Return the names of the options that are whole numbers."""
    return [name for name, kind in options.__annotations__.items() if kind.__forward_arg__ in ("int", "int | None")]


for each in of_types(TopicOptions):
    PLACES[f"topic.{each}"] = lambda value, each=each: gate.topic("p", **BESIDE.get(each, {}), **{each: value})
for each in of_types(GuardOptions):
    PLACES[f"once.{each}"] = lambda value, each=each: gate.once(key="{k}", scope="w", **{each: value})(lambda k: k)
for each in of_types(ClaimOptions):
    PLACES[f"claim.{each}"] = lambda value, each=each: gate.claim("k", **{each: value})

BAD = [
    pytest.param(value, id=text)
    for value, text in (
        (True, "True"), (False, "False"), ("5", "text"), ("10MB", "a size"), (1.0, "a float"), (float("nan"), "nan"),
        (float("inf"), "infinity"), (-1, "negative"), (2**53, "2**53"), (2**63, "2**63"), (2**64, "2**64"),
        (10**400, "10**400"), (b"5", "bytes"), ([], "a list"),
    )
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _handler() -> None:
    gate.topic("t").handler(work)


@for_each("value", BAD)
@for_each("place", PLACES)
def test_what_is_no_whole_number_in_range_is_refused(place: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        PLACES[place](value)
    assert refused.value.name == place.rpartition(".")[2].replace("merge", "cap")
    assert refused.value.value is value
    assert refused.value.fix
    assert "p" not in gate.topics


@for_each("place", [place for place in PLACES if place.startswith(("topic.", "once.", "Gate.max"))])
def test_the_smallest_and_a_usual_number_are_accepted(place: str) -> None:
    made = Gate(NOWHERE)
    for value in SMALLEST.get(place, (1, 4)):
        if place.startswith("topic."):
            name = place.removeprefix("topic.")
            made.topic(f"t{value}", **BESIDE.get(name, {}), **{name: value})
        else:
            PLACES[place](value)
    Gate(NOWHERE, max_bytes=LARGEST)


def test_each_whole_number_of_a_public_signature_has_a_place() -> None:
    # Given the methods that take options
    methods = {
        "Gate": Gate.__init__, "worker": type(gate.aio).worker, "subscribe": Gate.subscribe, "stream": Gate.stream,
        "consume_list": Gate.consume_list, "on_expired": Gate.on_expired, "audit": audit, "Adaptive": Adaptive.__init__,
    }  # fmt: skip
    for method, function in methods.items():
        for name, parameter in inspect.signature(function).parameters.items():
            if str(parameter.annotation) in ("int", "int | None"):
                assert f"{method}.{name}" in PLACES
    assert {"topic.max_size", "topic.burst", "once.max_attempts", "once.cache_size", "claim.max_attempts"} <= {*PLACES}


@for_each("rate", [10**400, float("nan"), float("inf"), True, "1/0s", f"{10**400}/s", -1])
def test_a_rate_out_of_range_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidArgument, match="rate="):
        gate.topic("p", rate=rate)


@for_each("payload", [10**400, -(10**400), float("nan"), float("inf")])
@for_each("merge", ["sum", "min", "max"])
def test_a_number_that_cannot_be_merged_is_refused(merge: Any, payload: Any) -> None:
    with pytest.raises(InvalidArgument, match="payload="):
        gate.topic(f"m-{merge}", merge=merge).trigger("k", payload)
