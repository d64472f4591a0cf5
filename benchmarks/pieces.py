"""What the pieces of a guarded call, of `trigger_many` and of a worker's loop cost the client: CPU of this process,
each alone and again and again, so from warm caches; on requests and replies that went over the wire once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from time import process_time
from typing import Any

import hiredis

from benchmarks.measuring import Row
from benchmarks.peers.speak import RESULT, payload
from benchmarks.plan import Plan
from idemgate import Delivery, Gate
from idemgate.core import keys
from idemgate.core.calls import Call, new_id
from idemgate.store.embedded.server import start
from idemgate.store.resp import encode_call, new_reader
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import SettledAndTaken, to_triggers
from idemgate.topics.triggers import MAX_TRIGGERS
from idemgate.worker.consumer import MAX_SETTLED, InFlight
from idemgate.worker.handler import build_run
from tests.claims import claims_of

__all__ = ["run"]

Ask = Callable[[bytes], bytes]
Pieces = dict[str, Callable[[], object]]

READER = new_reader()


def run(plan: Plan) -> list[Row]:
    """The rows, `client_us` only: of one call, or of one message of a batch."""
    with start() as server, Gate(server.url, namespace="bench", timeout="60s") as gate, _asking(server.url) as ask:
        kinds = {
            "guard": (_guard(gate), 1),
            "trigger_many": (_sent(gate, ask), MAX_TRIGGERS),
            "worker": (_worked(gate, ask), MAX_SETTLED),
        }
        return [
            {"who": who, "step": name, "client_us": [_cost(piece, plan, batch) for _ in range(plan.repetitions)]}
            for who, (pieces, batch) in kinds.items()
            for name, piece in pieces.items()
        ]


def _cost(piece: Callable[[], object], plan: Plan, batch: int) -> float:
    n = plan.size(20_000) // batch
    began = process_time()
    for _ in range(n):
        piece()
    return (process_time() - began) / (n * batch) * 1e6


def _guard(gate: Gate) -> Pieces:
    claims, codec = claims_of(gate), gate.context.codec
    record, owner = claims.key("sync", "order:123456"), new_id()
    claim = claims.claim(record, owner, 30_000, 86_400_000)
    words = ("EVALSHA", claim.script.sha, 1, *claim.keys, *claim.args)
    stored = codec.encode(RESULT)
    bare = hiredis.pack_command(words)
    return {
        "the key's name in Redis": lambda: claims.key("sync", "order:123456"),
        "the owner's id": new_id,
        "building the claim's call, framed": lambda: claims.claim(record, owner, 30_000, 86_400_000),
        "packing as many words (hiredis), where a call is not framed": lambda: hiredis.pack_command(words),
        "reading as many words (hiredis)": lambda: _read(bare),  # any array of as many strings
        "packing the result": lambda: codec.encode(RESULT),
        "unpacking it": lambda: codec.decode(stored),
    }


def _sent(gate: Gate, ask: Ask) -> Pieces:
    calls, pairs = gate.topic("sent").open(), [(f"key:{number}", payload(number)) for number in range(MAX_TRIGGERS)]
    found = to_triggers(pairs)
    checked = [calls.pack_trigger(one) for one in found]
    call = calls.trigger_packed(checked).calls[0]
    asked, heard = encode_call(call), _heard(gate, ask, call)
    reply = _read(heard)
    return {
        "a `Trigger` of each pair": lambda: to_triggers(pairs),
        "checking it: key, time, what else it asks for; its payload packed": lambda: [*map(calls.pack_trigger, found)],
        "of that: packing the payload": lambda: [gate.context.codec.encode(one.payload) for one in found],
        "the slot of its key, where a topic has several": lambda: [keys.slot_of(one[3], 8) for one in checked],
        "building the call": lambda: calls.trigger_packed(checked),
        "packing the call's words (hiredis)": lambda: encode_call(call),
        "sending it, waking up, reading the reply": lambda: ask(asked),  # a copy, which the server knows
        "of that: unpacking the reply (hiredis)": lambda: _read(heard),
        "making the receipts": lambda: call.answer(reply),
    }


def _worked(gate: Gate, ask: Ask) -> Pieces:
    topic = gate.topic("worked")
    topic.trigger_many([(f"key:{number}", payload(number)) for number in range(2 * MAX_SETTLED)])
    calls, before = topic.open(), [Settlement("ack", one) for one in topic.take(MAX_SETTLED)]
    call = calls.settle_and_take(0, before, MAX_SETTLED)
    asked, heard = encode_call(call), _heard(gate, ask, call)
    reply = _read(heard)
    found, context = call.answer(reply).taken.deliveries, copy_context()
    assert len(found) == MAX_SETTLED
    line: Any = None  # its worker's, of which a place is kept only
    held = [InFlight(line, one, 0.0, 0.0, 0.0) for one in found]

    def handler(delivery: Delivery[Any]) -> None:
        pass

    run = build_run(handler, gate.context)
    return {
        "building the call: what ends, and a take": lambda: calls.settle_and_take(0, before, MAX_SETTLED),
        "packing its words (hiredis)": lambda: encode_call(call),
        "sending it, waking up, reading the reply": lambda: ask(asked),
        "of that: unpacking the reply (hiredis)": lambda: _read(heard),
        "making the deliveries": lambda: call.answer(reply),
        "that, and unpacking payloads, if handlers ask for them": lambda: _payloads(call.answer(reply)),
        "noting that they are held": lambda: {InFlight(line, one, 0.0, 0.0, 0.0) for one in found},
        "calling the handler, in its own context": lambda: [context.copy().run(run, one) for one in found],
        "noting how each ended": lambda: [(one, Settlement("ack", one.delivery)) for one in held],
    }


def _payloads(turned: SettledAndTaken) -> list[Any]:
    return [one.payload for one in turned.taken.deliveries]


def _heard(gate: Gate, ask: Ask, call: Call[Any]) -> bytes:
    """The reply to a call of a script that the server may not know yet."""
    gate.context.link.command("SCRIPT", "LOAD", call.script.text)
    return ask(encode_call(call))


def _read(heard: bytes) -> Any:
    READER.feed(heard)
    return READER.gets()


@contextmanager
def _asking(url: str) -> Iterator[Ask]:
    """Over a socket of its own: a request's bytes, and those of the reply."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(url.removeprefix("unix://").partition("?")[0])

        def ask(asked: bytes) -> bytes:
            line.sendall(asked)
            reader, heard = new_reader(), bytearray()
            while reader.gets() is False:
                heard += (more := line.recv(1 << 20))
                reader.feed(more)
            return bytes(heard)

        yield ask
