"""Everything that reads what others wrote, each as a function of bytes: it gives a value, or refuses with the
documented error."""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple, cast

import msgpack
import redis.exceptions as rx

from idemgate.audit import keys as audit
from idemgate.audit import slot as slotaudit
from idemgate.cli import acl_rules as acl
from idemgate.cli import arguments
from idemgate.core import durations, keys
from idemgate.core.calls import Call, SlotMoved
from idemgate.core.codec import Codec, canonical
from idemgate.core.codec.models import rebuild
from idemgate.core.key_template import compile_key
from idemgate.dedup.dedup import DedupCalls
from idemgate.errors import DecodeError, InvalidArgument, NotConfigured, ServerRejected, UnexpectedData
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims
from idemgate.membership import heartbeats as members
from idemgate.membership.ownership import HeartbeatRequest
from idemgate.presence.report import decode_report
from idemgate.store.cluster.topology import Route, Topology
from idemgate.store.resp import PlainReader
from idemgate.subscribers.expiry import rules as expiry
from idemgate.subscribers.expiry.glob import matcher
from idemgate.subscribers.list_entries import ListCalls, TakenEntry, encode_dead_letter
from idemgate.subscribers.pubsub import PubSubMessage
from idemgate.subscribers.stream_group import Group, PendingEntry
from idemgate.topics import registry
from idemgate.topics import reshard as resizing
from idemgate.topics.dead_letters import DeadFilter, decode_dead_letter
from idemgate.topics.deliveries import Settlement
from idemgate.topics.merge import Merge, merge_of
from idemgate.topics.messages import Delivery, Forward, Message, Position, Trigger, decode_forwarded, decode_pause
from idemgate.topics.policy import diff_policies, from_stored
from idemgate.topics.recurring import build_recurring
from idemgate.topics.slots import open_topic
from idemgate.topics.topic_calls import TopicCalls
from tests.messages import pack_message

__all__ = ["DECODERS", "SECRET", "Decoder", "check_memory", "refused_or_read"]


class Decoder(NamedTuple):
    """`read` may raise what it `refuses` with, and nothing else."""

    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]


def refused_or_read(name: str, data: bytes) -> None:
    """Reads it; AssertionError, or whatever else was raised, where it is neither read nor refused."""
    decoder = DECODERS[name]
    with suppress(*decoder.refuses):
        decoder.read(data)


def check_memory(name: str, data: bytes) -> None:
    """A few bytes may not ask for much memory: 200 bytes each, or 4 MiB in all. AssertionError."""
    refused_or_read(name, b"")  # the first read may import modules
    tracemalloc.start()
    try:
        refused_or_read(name, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < max(4_194_304, 200 * len(data)), f"{peak:,} bytes of memory for {len(data):,}: {data[:12]!r}"


def _all_of(*things: object) -> None:
    """Reads every property, since what is read late must be refused as well."""
    for thing in things:
        for name, found in vars(type(thing)).items():
            if isinstance(found, property):
                getattr(thing, name)
        repr(thing)


# -- what is stored ---------------------------------------------------------------------------------------------------

_CODEC = Codec(max_bytes=65_536)
_ROOMY = Codec(max_bytes=1 << 20)
"""The same value may be packed a little longer than it came."""
_LOCAL = Gate("redis://nowhere").topic("t").policy
_MERGES = {name: merge_of(name) for name in ("last", "append", "union", "sum", "max")}  # type: ignore[arg-type]
_MERGES["fields"] = merge_of({"a": "append", "b": "sum", "*": "last"})


def _value(data: bytes) -> None:
    value = _CODEC.decode(data)
    with suppress(InvalidArgument):  # a value may be read whose packed form has more levels, or more bytes
        packed = _ROOMY.encode(value)
        assert canonical(_ROOMY.decode(packed)) == canonical(value)


_WHOLE = pack_message()
"""A message."""


def _message(data: bytes, merge: Merge) -> None:
    message = Message(data, merge, _CODEC)
    made = Delivery[object]("t", 0, b"k", 1, 1, message)
    _all_of(made, message)


def _report(data: bytes) -> object:
    return decode_report("", datetime(2026, 12, 24, tzinfo=UTC), data)


def _letter(data: bytes) -> None:
    for merge in _MERGES.values():  # as a file may hold it
        with suppress(DecodeError):
            TopicCalls("n", "t", replace(_LOCAL, merge=merge), _CODEC, None).check_stored(data)
    letter = decode_dead_letter(0, b"7", data, _MERGES["last"], _CODEC)
    _all_of(letter, letter.message)


def _policy(data: bytes) -> None:
    policy = from_stored(data, _LOCAL)
    policy.for_scripts()
    policy.slot_limits(0)
    diff_policies(data, _LOCAL.pack_stored())


@dataclass
class Line:
    item: str
    price: Decimal
    notes: list[str] | None = None


@dataclass
class Order:
    lines: list[Line]
    by: dict[str, Line | int]


def _model(data: bytes) -> None:
    repr(rebuild(_CODEC.decode(data), Order))


_PARTS = ("messages", "next", "inflight", "dead_data", "meta", "group_active", "dedup")
_TABLE: bytes = msgpack.packb([1, 3, 1])
"""Of event ids: layout, buckets, ids."""


def _audited(data: bytes) -> None:
    """The auditor tells what it cannot read as a finding, and raises nothing at all."""
    slotaudit.decode_topic_entry(data, False)
    list(audit.check_record(b"ig2:{n:once:s:k}", -1, data, 1_700_000_000_000_000, Codec()))
    empty: dict[str, Any] = {one.name: {} for one in fields(slotaudit.Contents)} | {"now_ms": 1}
    slot, topic = slotaudit.Slot("n", "t", 0, 1), slotaudit.TopicEntry(1, 1, _MERGES["last"], False, 0)
    name, _, value = data.partition(b"\0")
    for part in _PARTS:
        found = slotaudit.Contents(**empty | {part: {name: value, b"k": data}})
        view = slotaudit.SlotView(slot, found, topic, _CODEC)
        slotaudit.check_slot(view)
        slotaudit.balance(view)
    for memo in ({name: value, b"e": _TABLE}, {b"e0": data, b"e": _TABLE}, {b"e0": bytes(24), b"e": data}):
        found = slotaudit.Contents(**empty | {"dedup": memo})
        slotaudit.check_slot(slotaudit.SlotView(slot, found, topic, _CODEC))
    for part in ("scheduled", "leases", "dead", "dedup_expiry", "ready", "group_waiting"):
        found = slotaudit.Contents(**empty | {part: {data: 1.0}})
        slotaudit.check_slot(slotaudit.SlotView(slot, found, topic, _CODEC))


def _key_name(data: bytes) -> None:
    for key in (data, b"ig2:{n:" + data, b"ig2:{n:once:" + data, b"ig2:{n:topic:" + data):
        owner = keys.owner_of("n", key)
        list(audit.check_unknown_key(owner, key))
        list(audit.check_registered(owner, key, {"t": None}))


# -- what a server answers --------------------------------------------------------------------------------------------


def _calls() -> Iterator[Call[Any]]:
    claims, record = Claims("n", None), (b"ig2:{n:once:s:k}",)
    given = claims.inspect(record).answer([b"ok", 1, b"p", b"o" * 16, 7, 1, 1, 1, b"", b"", b"", b"", 0, b"0", 1])
    yield claims.claim(record, b"o", 1, 1)
    yield from claims.mark_many((*record, b"ig2:{n:once:s:l}"), 1, 100)
    yield claims.renew(record, b"o", 1, 1)
    yield claims.inspect(record)
    yield claims.forget(record, b"o", given, force=True)
    yield DedupCalls("n", None, "s", 3_600_000).add("k")
    topic = TopicCalls("n", "t", _LOCAL, _CODEC, None)
    delivery = Delivery[Any]("t", 0, b"k", 1, 1, Message(_WHOLE, _MERGES["last"], _CODEC))
    yield open_topic("n", None, "t", _LOCAL)
    yield topic.trigger(Trigger("k", 1))
    yield from topic.trigger_many([Trigger("k", 1), Trigger("l", 1)]).calls
    yield topic.take(0, 5)
    yield topic.settle(0, [Settlement("ack", delivery)])
    yield topic.extend(0, [delivery])
    yield topic.forward(0, Forward("list", None, 0), 5)
    yield topic.flush("k")
    yield topic.flush_slot(0)
    yield topic.peek("k")
    yield topic.dead(0, DeadFilter(), 10)
    yield topic.messages(0, Position(), 10)
    yield topic.take_dead(0, "redrive", [])
    yield from topic.load_dead([(b"k", b"letter")]).calls
    yield from topic.pause().calls
    yield registry.list_entries("n", None)
    yield slotaudit.read_slot(slotaudit.Slot("n", "t", 0, 1), None, 100, 1000)
    yield expiry.look(b"k", None)
    yield resizing._begin(topic, 2)
    yield resizing._end(topic, b"c", "done", b"", b"")
    yield resizing._unload(topic, 0, b"c", 0)
    yield resizing._list_replies(topic, 0, 0, b"0")
    yield resizing._purge(topic, 0, b"c", True)
    yield members.heartbeat("n", "g", None, HeartbeatRequest("m", 1, ("t",), 0, (), (), (("t", 0),)), 1)
    yield members.list_members("n", "g", None)
    jobs = ListCalls("s", "c", None, lease_ms=1, pop="left", max_dead_letters=1)
    taken = TakenEntry("s", b"1", b"1 c", b"x")
    yield jobs.take(1)
    yield jobs.renew([taken])
    yield jobs.bury(taken, b"{}")
    group = Group(cast(Any, None), "s", "g", "c", 1)
    yield group.renew([b"1-0"])
    yield group.build_leave("c")
    yield group.build_release(PendingEntry("s", b"1-0", [], 1), 1, undo=True)


CALLS = tuple(_calls())


def _answer(data: bytes) -> None:
    """The first byte says what was asked, the others are what the server said."""
    reader = PlainReader()
    reader.feed(data[1:])
    while (reply := reader.gets()) is not False:
        found = CALLS[data[0] % len(CALLS)].answer(reply)
        _all_of(*getattr(found, "deliveries", ()), *filter(None, [getattr(found, "pending", None)]))


def _cluster(data: bytes) -> None:
    """What nodes say of who serves what, and of a request that went to the wrong one."""
    topology, route = Topology([("h", 1)]), Route(("h", 1))
    topology.redirect(rx.ResponseError(data.decode(errors="replace")), route)
    reader = PlainReader()
    reader.feed(data)
    while (reply := reader.gets()) is not False:
        topology.apply_slots(("h", 1), reply)
        topology.find_owner(b"k")


def _entry(data: bytes) -> None:
    number, *raw = data.split(b"\0")
    PendingEntry("s", number, raw, 1)
    encode_dead_letter(TakenEntry("s", b"1", b"1 c", data), _text(data), _text(data))


# -- what people say --------------------------------------------------------------------------------------------------

SECRET = "s3cr3t"


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _duration(data: bytes) -> None:
    assert 0 <= durations.milliseconds(_text(data), "x", zero=True) <= durations.LONGEST_MS


def _argument(data: bytes) -> None:
    for meaning in (arguments.duration, arguments.span, arguments.factor, arguments.count):
        with suppress(argparse.ArgumentTypeError):
            meaning(_text(data))


def _template(data: bytes) -> None:
    template, _, value = _text(data).partition("\0")

    def func(a: object, b: object) -> None: ...

    key = compile_key(template, func).of(None, (value, {"id": value}), {})
    keys.record("n", value or "s", key)


def _pattern(data: bytes) -> None:
    pattern, _, key = data.partition(b"\0")
    matcher(pattern)(key)


def _cron(data: bytes) -> None:
    expression, _, zone = _text(data).partition("\0")
    build_recurring("r", expression, zone or "UTC", None)


def _url(data: bytes) -> None:
    """A password is in no error and no repr, however wrong the URL is."""
    scheme, before, after, rest = (_text(data).replace(SECRET, "").split("\n") + [""] * 4)[:4]
    url, refusal = f"{scheme or 'redis'}://u:{before}{SECRET}{after}@{rest}", None
    try:
        shown = repr(Gate(url).context.endpoint)
    except (InvalidArgument, NotConfigured) as error:
        shown, refusal = _told(error), error
    assert SECRET not in shown
    if refusal is not None:
        raise refusal


def _told(error: BaseException | None) -> str:
    return (
        "" if error is None else f"{error!r} {error} {vars(error)}" + _told(error.__cause__) + _told(error.__context__)
    )


def _rule(data: bytes) -> None:
    pattern, _, name = _text(data).partition("\0")
    words = acl.rule(["worker"], name or "n", "u", keys=[pattern], channels=[pattern])
    assert not any(set(word) & set(" \"'\r\n") for word in words)


_STORED = (DecodeError,)
_SAID = (InvalidArgument,)
DECODERS: dict[str, Decoder] = {
    "value": Decoder(_value, _STORED),
    **{
        f"message-{name}": Decoder(lambda data, merge=merge: _message(data, merge), _STORED)  # type: ignore[misc]
        for name, merge in _MERGES.items()
    },
    "letter": Decoder(_letter, _STORED),
    "report": Decoder(_report, _STORED),
    "forwarded": Decoder(lambda data: _all_of(decode_forwarded("t", data, _MERGES["last"], _CODEC)), _STORED),
    "pause": Decoder(decode_pause, _STORED),
    "policy": Decoder(_policy, _STORED),
    "model": Decoder(_model, _STORED),
    "audited": Decoder(_audited, ()),
    "key-name": Decoder(_key_name, ()),
    "answer": Decoder(_answer, (DecodeError, UnexpectedData, SlotMoved, ServerRejected, rx.InvalidResponse)),
    "cluster": Decoder(_cluster, (rx.InvalidResponse,)),
    "entry": Decoder(_entry, (ValueError,)),
    "heard": Decoder(lambda data: PubSubMessage("c", data).json(), (ValueError,)),
    "duration": Decoder(_duration, _SAID),
    "argument": Decoder(_argument, (ValueError,)),
    "template": Decoder(_template, _SAID),
    "pattern": Decoder(_pattern, ()),
    "cron": Decoder(_cron, _SAID),
    "url": Decoder(_url, (InvalidArgument, NotConfigured)),
    "rule": Decoder(_rule, _SAID),
}


# -- contexts of traces, where that package is installed --------------------------------------------------------------


def _trace(data: bytes) -> None:
    """A context that is read is stored in one form."""
    from idemgate_otel.w3c import pack, unpack

    if (context := unpack(data)) is not None and context.trace_flags.sampled:
        assert unpack(pack(context)) == context


with suppress(ImportError):
    import idemgate_otel as _  # noqa: F401

    DECODERS["trace"] = Decoder(_trace, ())


# -- what comes with webhooks, where that package is installed --------------------------------------------------------


def _signed(data: bytes) -> None:
    """Nobody without the secret makes a signature."""
    from idemgate_http.webhooks import StandardWebhooks

    number, at, signature, body = (data.split(b"\n", 3) + [b""] * 4)[:4]
    headers = {"Webhook-Id": _text(number), "webhook-timestamp": _text(at), "WEBHOOK-SIGNATURE": _text(signature)}
    StandardWebhooks("whsec_" + "x" * 32).verify(headers, body, 1_700_000_000.0)
    raise AssertionError("signed by nobody")


def _retry_after(data: bytes) -> None:
    from idemgate_webhook.answers import retry_after

    found = retry_after(_text(data), 1_700_000_000.0)
    assert found is None or found >= 0


def _target(data: bytes) -> None:
    """A URL with the address of this machine in it is refused, in whatever form."""
    from idemgate_webhook.guarded import Guarded
    from idemgate_webhook.outgoing import checked_url
    from idemgate_webhook.reach import literal

    checked_url(_text(data), https_only=False, transport=Guarded())
    with suppress(UnicodeEncodeError):
        address = literal(_text(data))
        assert address is None or not address.startswith("127.") or Guarded().reach.refuses(address)


with suppress(ImportError):
    from idemgate_http.webhooks import BadSignature

    DECODERS |= {
        "signature": Decoder(_signed, (BadSignature,)),
        "retry-after": Decoder(_retry_after, ()),
        "target": Decoder(_target, _SAID),
    }
