"""Merge policies: how the payloads of one window become one.

A payload is *lifted* to an accumulator when it is triggered, accumulators are merged in Lua (`lua/lib/merge.lua`, the
only place that knows how), and what a delivery carries is *lowered* back to a payload here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast

import msgpack

from idemgate.core.codec import Codec
from idemgate.errors import InvalidArgument

__all__ = ["Merge", "MergeSpec", "append", "merge_of", "merge_of_spec", "union", "wrapped"]

Name = Literal["last", "first", "append", "union", "count", "sum", "min", "max"]
NAMES = ("last", "first", "append", "union", "count", "sum", "min", "max")
EXACT = 2**53
"""Redis scripts count in doubles: integers beyond this are not exact."""
MAX_BYTES = 1_048_576
MAX_FIELDS = 1000
"""Of a payload that is merged by field; and of what it is merged to, where the policy does not name them."""
_DROPPED = b"\xff"
"""In the place of a field: how many there was no room for."""


class Merge:
    """One merge policy as a value; made by name, by `append(cap)`, `union(cap)`, or as a mapping of field -> policy."""

    __slots__ = ("fields", "raw", "rest", "spec")

    def __init__(
        self, spec: dict[str, object], fields: dict[str, Merge] | None = None, rest: Merge | None = None
    ) -> None:
        self.spec = spec
        self.fields = fields or {}
        self.rest = rest
        self.raw = spec["op"] in ("last", "first")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Merge) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(repr(self.spec))

    def __repr__(self) -> str:
        return f"Merge({self.spec!r})"

    def lift(self, payload: object, codec: Codec) -> bytes:
        """The accumulator of one payload as a script takes it. InvalidArgument if the policy cannot merge such a payload."""
        if self.raw:
            return codec.encode(payload)
        unit = wrapped(self._unit(payload, codec, "payload"))
        if self.spec["op"] in ("fields", "union") and len(unit) > codec.max_bytes:
            problem = f"takes {len(unit):,} bytes; the limit is {codec.max_bytes:,}"
            raise InvalidArgument(
                "payload", type(payload), problem, "Store it elsewhere and pass a reference, or raise the limit"
            )
        return unit

    def lower(self, acc: Any, codec: Codec) -> Any:
        """The payload that an accumulator (as unpacked from a message, strings as bytes) stands for."""
        op = self.spec["op"]
        if op in ("last", "first"):
            return codec.decode(acc)
        if op == "count":
            return acc[0]
        if op == "sum":
            return float(acc[0]) if acc[1] else acc[0]
        if op in ("min", "max"):
            return codec.decode(acc[1])
        if self.itemized:
            return [codec.decode(item) for item in self.items(acc)]
        return {name: self.of(name).lower(part, codec) for name, part in self.parts(acc).items()}

    def dropped(self, acc: Any) -> int:
        """How many items an `append` or a `union`, or fields a mapping had no room for."""
        op = self.spec["op"]
        if op == "append":
            return int(acc[1])
        if op == "union":
            return int(acc[0])
        if op == "fields":
            own = cast("dict[bytes, Any]", acc).get(_DROPPED, 0) if isinstance(acc, dict) else 0
            return int(own) + sum(self.of(name).dropped(part) for name, part in self.parts(acc).items())
        return 0

    @property
    def drops(self) -> bool:
        """Whether it may have no room for an item."""
        return self.spec["op"] in ("append", "union", "fields")

    @property
    def itemized(self) -> bool:
        """Whether its payload is a list of items."""
        return self.spec["op"] in ("append", "union")

    def items(self, acc: Any) -> list[bytes]:
        """The encoded items of an append or a union."""
        return _items(acc[2]) if self.spec["op"] == "append" else acc[1]

    def parts(self, acc: Any) -> dict[str, Any]:
        """The accumulators of the fields."""
        # An empty Lua table comes back as an empty array.
        found = cast("dict[bytes, Any]", acc) if isinstance(acc, dict) else {}
        return {field.decode(): part for field, part in found.items() if field != _DROPPED}

    def of(self, field: str) -> Merge:
        """The policy of a field."""
        return self.fields.get(field) or cast(Merge, self.rest)

    def _unit(self, payload: object, codec: Codec, name: str) -> object:
        op = self.spec["op"]
        if op in ("last", "first"):
            return codec.encode(payload, name)
        if op == "count":
            return [1, 0]
        if op == "sum":
            return [_number(payload, name, "sum"), 1 if isinstance(payload, float) else 0]
        if op in ("min", "max"):
            return [_number(payload, name, op), codec.encode(payload, name)]
        if op == "append":
            return [1, 0, wrapped(codec.encode(payload, name))]
        if op == "union":
            return self._set(payload, codec, name)
        if not isinstance(payload, Mapping):
            raise InvalidArgument(name, payload, "not a mapping", "A merge policy per field needs a dict as payload")
        given = cast("Mapping[object, object]", payload)
        if len(given) > MAX_FIELDS:
            problem = f"has {len(given):,} fields; the limit is {MAX_FIELDS:,}"
            raise InvalidArgument(
                name, type(given), problem, "Pass those that are to be merged, or put them into one field"
            )
        return {
            _field(field): self.of(cast(str, field))._unit(value, codec, f"{name}[{field!r}]")
            for field, value in given.items()
        }

    def _set(self, payload: object, codec: Codec, name: str) -> object:
        if not isinstance(payload, list | tuple | set | frozenset):
            raise InvalidArgument(
                name, payload, "not a collection", 'merge="union" needs a list, tuple or set of items'
            )
        items = list(dict.fromkeys(codec.encode(item, name) for item in cast("list[object]", payload)))
        cap = cast(int, self.spec["cap"])
        return [len(items[cap:]), items[:cap]]


MergeSpec: TypeAlias = Name | Merge | Mapping[str, "Name | Merge"]


def append(cap: int = 1000) -> Merge:
    """All payloads in the order of their triggers, the first `cap` of them (and at most 1 MiB); the rest is dropped and
    counted in `delivery.dropped`."""
    return Merge({"op": "append", "cap": _cap(cap), "bytes": MAX_BYTES})


def union(cap: int = 1000) -> Merge:
    """The distinct items of all payloads (each a list, tuple or set), first seen first; at most `cap` items and 1 MiB,
    the rest is dropped and counted in `delivery.dropped`. Items are the same when they are encoded the same: 1 and
    1.0 are two."""
    return Merge({"op": "union", "cap": _cap(cap), "bytes": MAX_BYTES})


def merge_of(given: MergeSpec) -> Merge:
    """The policy that a user's `merge=` means, or InvalidArgument. A mapping's `"*"` is for fields that it does not name
    (default: last), of which a message has the first 1,000; further ones are dropped and counted in
    `delivery.dropped`."""
    if isinstance(given, Merge):
        return given
    if isinstance(given, str):
        if given not in NAMES:
            raise InvalidArgument(
                "merge",
                given,
                "no such merge policy",
                f"Use one of {', '.join(NAMES)}, or a dict of field -> policy",
            )
        return {"append": append, "union": union}.get(given, lambda: Merge({"op": given}))()
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgument(
            "merge",
            given,
            "not a merge policy",
            f"Use one of {', '.join(NAMES)}, or a dict of field -> policy",
        )
    policies = {_field(field, "merge"): merge_of(policy) for field, policy in given.items()}
    if any(policy.fields or policy.rest for policy in policies.values()):
        raise InvalidArgument(
            "merge",
            given,
            "a field's policy is itself one per field",
            "Only the fields of the payload itself can have policies",
        )
    rest = policies.pop("*", Merge({"op": "last"}))
    fields = {field: policy.spec for field, policy in sorted(policies.items())}
    return Merge({"op": "fields", "fields": fields, "rest": rest.spec}, policies, rest)


def merge_of_spec(spec: dict[str, Any]) -> Merge:
    """The policy that a stored spec stands for; InvalidArgument, or what a missing member raises, for one of nothing."""
    if spec["op"] != "fields":
        return _simple(spec)
    fields = {field: _simple(part) for field, part in cast("dict[str, Any]", spec["fields"] or {}).items()}
    return Merge(spec, fields, _simple(spec["rest"]))


def _simple(spec: dict[str, Any]) -> Merge:
    if spec["op"] not in NAMES:
        raise InvalidArgument("merge", spec["op"], "no such merge policy", f"Use one of {', '.join(NAMES)}")
    if spec["op"] in ("append", "union"):
        _cap(spec["cap"])
    return Merge(spec)


def _field(name: object, what: str = "payload") -> str:
    if not isinstance(name, str):
        raise InvalidArgument(what, name, "a field's name is not a str", "Use text for the fields of a merged payload")
    return name


def _cap(cap: int) -> int:
    if not isinstance(cap, int) or isinstance(cap, bool) or not 1 <= cap <= 100_000:
        raise InvalidArgument("cap", cap, "not a number of items", "Use 1 to 100,000")
    return cap


def _number(value: object, name: str, op: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(name, value, "not an int or float", f'merge="{op}" needs numbers')
    if not math.isfinite(value) or (isinstance(value, int) and abs(value) > EXACT):
        raise InvalidArgument(
            name, value, "not a number that merges exactly", "Use finite numbers, and integers up to 2**53"
        )
    return value


def wrapped(value: object) -> bytes:
    """As scripts read it."""
    # The old string type: every Redis' cmsgpack reads it back as a string.
    return msgpack.packb(value, use_bin_type=False)


def _items(wrapped: bytes) -> list[bytes]:
    # Strings only: a header of anything else could ask for gigabytes.
    unpacker = msgpack.Unpacker(
        raw=True, max_buffer_size=0, max_str_len=len(wrapped),
        max_array_len=0, max_map_len=0, max_bin_len=0, max_ext_len=0,
    )  # fmt: skip
    unpacker.feed(wrapped)
    return list(unpacker)
