"""Passwords and payloads are in no log, no repr and no error."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack
import pydantic
import pytest
import redis

import idemgate
from idemgate import Adaptive, Bury, Delivery, Gate, PartialFailure, Retry, Trigger
from idemgate.cli import main
from idemgate.core.codec.models import rebuild
from idemgate.errors import DecodeError, IdemgateError, Overloaded, StoreUnavailable
from idemgate.testing import Clock
from tests.claims import claims_of
from tests.cluster import unused_ports
from tests.conftest import PASSWORD, Face

PAYLOAD = "c4n4ry-p4yl04d"


class Ledger:
    """What was seen of the library: texts of errors and their causes, reprs."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def error(self, error: BaseException) -> None:
        # What was asked for is a field of its error, as the value that was refused is: the caller's own, in no text.
        facts = {name: fact for name, fact in vars(error).items() if name not in ("result", "value")}
        # The lines of the source are those of this file, and name it.
        told = traceback.TracebackException.from_exception(error)
        self.seen += [*told.format_exception_only(), repr(error), repr(facts)]
        for cause in (error.__cause__, error.__context__):
            if cause is not None:
                self.error(cause)

    async def ask(self, asked: Callable[[], Any]) -> Any:
        try:
            found = asked()
            return await found if asyncio.iscoroutine(found) else found
        except IdemgateError as error:
            self.error(error)


def shown(thing: object) -> list[str]:
    return [repr(thing), str(thing), f"{thing!r:.10000}"]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.DEBUG)

    def text() -> str:
        return "\n".join(
            " ".join([record.getMessage(), repr(vars(record) | {"msg": ""}), record.exc_text or ""])
            for record in caplog.records
        )

    return text


async def provoked(face: Face, ledger: Ledger, clock: Clock) -> None:
    """Every error that the guard and the topics raise, with a payload that nobody is to see."""
    guarded = face.once(key="{k}", scope="s", fingerprint=["payload"])(lambda k, payload: payload)
    await guarded("k", PAYLOAD)
    ledger.seen += shown(guarded)
    await ledger.ask(lambda: guarded("k", f"{PAYLOAD} 2"))
    await ledger.ask(lambda: face.once(key="{k}", scope="d", on_done="raise")(lambda k: PAYLOAD)("k"))
    await ledger.ask(lambda: face.once(key="{k}", scope="d", on_done="raise")(lambda k: PAYLOAD)("k"))
    claim = await face.claim("k", lease="1s", on_lease_loss="hold", max_attempts=1)
    ledger.seen += shown(getattr(claim, "inner", claim))
    await claim.checkpoint(PAYLOAD)
    await ledger.ask(lambda: face.cancel("k"))
    await ledger.ask(lambda: face.forget("k"))
    clock.advance("10s")
    await ledger.ask(lambda: face.claim("k"))
    await ledger.ask(lambda: face.resolve("k", done=True, result=PAYLOAD))
    ledger.seen += shown(await face.claim("k")) + shown(await face.inspect("k"))
    topic = face.topic("t", window="1s", max_attempts=1)
    await topic.trigger("k", {"secret": PAYLOAD})
    await topic.trigger_many([Trigger("a", PAYLOAD), Trigger("b", PAYLOAD)])
    ledger.seen += shown(Trigger("a", PAYLOAD))
    clock.advance("2s")
    taken = await topic.take(10)
    ledger.seen += [text for one in [getattr(topic, "inner", topic), *taken] for text in shown(one)]
    await topic.bury(taken[0], reason="no")
    ledger.seen += shown(await topic.stats()) + shown((await topic.dead.list())[0]) + shown(await topic.peek("b"))
    await ledger.ask(lambda: topic.trigger("k", object()))
    await ledger.ask(lambda: face.topic("t", window="9s"))
    await ledger.ask(lambda: face.topic("t", window="9s").trigger("k", PAYLOAD))
    await ledger.ask(lambda: topic.nack(taken[1], items=["nothing of it"]))


async def test_a_password_and_a_payload_are_nowhere_to_be_seen(
    faces: Callable[..., Face], logged: Callable[[], str], clock: Clock, raw: Any, namespace: str
) -> None:
    ledger = Ledger()
    # Given a user with a password, who does all that there is, and provokes what goes wrong
    face = faces("admin")
    await provoked(face, ledger, clock)
    # And a user who may not, one whose password is wrong, one whose server is gone, and one with a wrong URL
    viewer = faces("viewer")
    await ledger.ask(lambda: viewer.first("new", "1h"))
    (port,) = unused_ports(1)
    away = [f"redis://u:{PASSWORD}@127.0.0.1:{port}", f"rediss://u:{PASSWORD}@127.0.0.1:{port}?ssl_cert_reqs=none"]
    wrong = str(
        face.gate.context.endpoint.settings["path" if "path" in face.gate.context.endpoint.settings else "host"]
    )
    away.append(f"unix://u:{PASSWORD}-wrong@{wrong}" if wrong.startswith("/") else f"redis://u:{PASSWORD}@{wrong}")
    for url in [*away, f"redis://u:{PASSWORD}@h:port", f"redis+sentinel://u:{PASSWORD}@h", f"x://:{PASSWORD}@h"]:
        await ledger.ask(lambda url=url: Gate(url))
        with suppress(IdemgateError), Gate(url, timeout="50ms", namespace=namespace) as gate:
            ledger.seen += shown(gate) + shown(gate.context.endpoint)
            other = Face(gate, face.awaiting)
            await ledger.ask(lambda other=other: other.first("k", "1h"))
            await gate.aio.close()
    # And a foreign key
    raw.lpush(claims_of(face.gate).key("s", "foreign")[0], PAYLOAD)
    await ledger.ask(lambda: face.claim("foreign", scope="s"))
    # Then neither is in what was shown, raised or logged
    ledger.seen += (
        shown(face.gate) + shown(face.gate.context.endpoint) + shown(face.gate.context.link) + shown(face.gate.aio)
    )
    everything = "\n".join(ledger.seen) + logged()
    assert len(ledger.seen) > 60
    assert PASSWORD not in everything
    assert PAYLOAD not in everything


@pytest.mark.parametrize("given", ["url", "client"])
async def test_what_sentinels_are_asked_with_is_nowhere_to_be_seen(
    logged: Callable[[], str], given: str, three_tries: Any
) -> None:
    # Given sentinels that want a password, and are gone
    (port,), ledger = unused_ports(1), Ledger()
    finder = redis.Sentinel([("127.0.0.1", port)], sentinel_kwargs={"password": PASSWORD})
    known = {"url": f"redis+sentinel://u:{PASSWORD}@127.0.0.1:{port}/svc", "client": finder.master_for("svc")}[given]
    gate, says = Gate(known, timeout="30s"), f"No master found for 'svc' by any of the sentinels 127.0.0.1:{port}"
    with three_tries():
        for face in (Face(gate, False), Face(gate, True)):
            with pytest.raises(StoreUnavailable, match=says):
                await face.first("k", "1h")
            await ledger.ask(lambda face=face: face.first("k", "1h"))
            await ledger.ask(lambda face=face: face.once(key="{k}", scope="s", on_store_error="run")(lambda k: k)("x"))
    await gate.aio.close()
    gate.close()
    assert "No master found" in "\n".join(ledger.seen)
    assert PASSWORD not in "\n".join(ledger.seen) + logged()


async def test_a_worker_logs_no_payload(faces: Callable[..., Face], logged: Callable[[], str]) -> None:
    # Given handlers that fail in every way
    gate = faces("worker", "guard").gate
    topic, done = gate.topic("t", max_attempts=1), asyncio.Event()
    heard: list[str] = []

    @topic.handler
    def handle(delivery: Any) -> None:
        heard.append(delivery.key)
        if len(heard) == 4:
            done.set()
        if delivery.key == "bury":
            raise Bury("no")
        if delivery.key == "retry":
            raise Retry("later", delay="1h")
        if delivery.key == "fail":
            raise RuntimeError("no")

    # When a worker runs them
    async with gate.aio.worker():
        for key in ("bury", "retry", "fail", "fine"):
            await topic.aio.trigger(key, PAYLOAD)
        await asyncio.wait_for(done.wait(), 60)
    # Then its logs name the keys, not the payloads, nor the password
    assert "'fail'" in logged() or "fail" in logged()
    assert PAYLOAD not in logged()
    assert PASSWORD not in logged()


async def test_what_a_worker_does_besides_logs_no_payload(
    faces: Callable[..., Face], logged: Callable[[], str], clock: Clock
) -> None:
    # Given handlers, in threads and not, that say which items failed, that they are overloaded, or what is not so
    gate, ledger = faces("admin", "subscriber", channels=["c4n4ry.*"]).gate, Ledger()
    gate.subscribe("c4n4ry.*", pattern=True)(lambda heard: heard.json())
    many = gate.topic("many", window="1s", merge="append", slots=2, adaptive=Adaptive(most=4), max_attempts=2)
    one, heard = gate.topic("one", window="1s", max_attempts=1), list[Delivery[Any]]()

    @many.handler
    async def some(delivery: Delivery[Any]) -> object:
        heard.append(delivery)
        if delivery.key == "overloaded":
            raise Overloaded("later")
        return PartialFailure([f"{PAYLOAD} 1"] if delivery.key == "partial" else ["is not of it"], "some failed")

    @one.handler
    def alone(delivery: Delivery[Shape]) -> None:
        heard.append(delivery)
        ledger.seen.extend(shown(delivery))
        _ = delivery.payload

    # When members of a group work, triggers of a tick travel together, and slots change
    for topic, keys in ((many, ("partial", "overloaded", "wrong")), (one, ("model",))):
        await asyncio.gather(*(topic.aio.trigger(key, f"{PAYLOAD} {n}") for key in keys for n in range(2)))
        await ledger.ask(lambda topic=topic: topic.aio.trigger("bad", object()))
    ledger.seen.append(repr(await many.aio.reshard(4)))
    clock.advance("2s")
    async with gate.aio.worker(membership="redis"), gate.aio.subscribers():
        gate.context.link.command("PUBLISH", "c4n4ry.a", PAYLOAD)
        end = asyncio.get_running_loop().time() + 60
        while gate.counters["worker.dead"] < 3 or len(heard) < 6 or not gate.counters["channel.failed"]:
            assert asyncio.get_running_loop().time() < end, (heard, gate.counters)
            clock.advance("2s")  # a member that says nothing for longer has lapsed
            await asyncio.sleep(0.01)
    for topic in (many, one):
        ledger.seen += [text for letter in await topic.aio.dead.list() for text in shown(letter)]
        await ledger.ask(lambda topic=topic: topic.decode_forwarded(PAYLOAD.encode()))
        await ledger.ask(lambda topic=topic: topic.decode_forwarded(msgpack.packb([1, PAYLOAD, PAYLOAD, PAYLOAD])))
    # Then its logs name keys and items by nothing that they hold
    assert [text for text in ledger.seen if PAYLOAD in text] == []
    assert PAYLOAD not in logged()


class Colour(Enum):
    RED = "red"


class Shape(pydantic.BaseModel):
    colour: Colour
    corners: int


@dataclass
class Drawing:
    shapes: list[Shape | Colour]


@pytest.mark.parametrize(
    "value", [{"shapes": [{"colour": PAYLOAD, "corners": 3}]}, {"shapes": [{"colour": "red", "corners": PAYLOAD}]}]
)
def test_what_does_not_fit_a_model_is_not_shown(value: Any) -> None:
    ledger = Ledger()
    for fits, model in ((value, Drawing), (value["shapes"][0], Shape), (PAYLOAD, Colour), ({"no": PAYLOAD}, Drawing)):
        with pytest.raises(DecodeError) as refused:
            rebuild(fits, model)
        ledger.error(refused.value)
    assert PAYLOAD not in "\n".join(ledger.seen)
    assert "corners" in ledger.seen[0] or "colour" in ledger.seen[0]


def test_every_public_error_is_one_of_ours() -> None:
    # What is not IdemgateError is what handlers raise themselves.
    errors = [one for one in map(vars(idemgate.errors).get, idemgate.errors.__all__) if isinstance(one, type)]
    found = {one.__name__ for one in errors if issubclass(one, Exception) and not issubclass(one, IdemgateError)}
    assert found <= {"Bury", "DownstreamUnavailable", "Retry", "Overloaded", "PartialFailure"}


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--audit"], ["acl"], ["run", "app:gate", "--topics"], []])
def test_a_url_in_the_wrong_place_of_a_command_line_is_not_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, f"redis://u:{PASSWORD}@h/0", "--no-such-option"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert PASSWORD not in told
    assert "usage: idemgate" in told
