"""Merge policies: the merging of all payloads of one window into one.

`Merge.lift` converts the payload of a trigger to an accumulator. Accumulators are merged in Lua only, in
`topics/scripts/lib/payloads.lua`. `Merge.lower` converts the accumulator of a delivery back to a payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

import msgpack

from idemgate.core.codec import Codec
from idemgate.errors import InvalidArgument, TooLarge

__all__ = ["Merge", "MergeSpec", "append", "merge_of", "merge_of_spec", "pack", "union"]

Name = Literal["last", "first", "append", "union", "count", "sum", "min", "max"]
NAMES: tuple[Name, ...] = get_args(Name)
EXACT = 2**53
"""Redis scripts compute with doubles: integers beyond this are not exact."""
MAX_SUMMAND = 1e290
"""The largest number that `sum` adds. A message counts at most 2**40 triggers, so no sum becomes infinite."""
MAX_BYTES = 1_048_576
MAX_FIELDS = 1000
"""Maximum fields of one payload, and of a merged payload for fields without their own policy."""
_DROPPED = b"\xff"
"""The name under which the number of dropped fields is stored."""


class Merge:
    """A merge policy; created by name, by `append(cap)`, by `union(cap)`, or from a mapping of field to policy."""

    __slots__ = ("fields", "op", "raw", "rest", "spec")

    def __init__(
        self, spec: dict[str, object], fields: dict[str, Merge] | None = None, rest: Merge | None = None
    ) -> None:
        self.spec: dict[str, object] = spec
        self.op: Name | Literal["fields"] = cast(Any, spec["op"])
        self.fields: dict[str, Merge] = fields or {}
        self.rest: Merge | None = rest
        self.raw: bool = self.op in ("last", "first")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Merge) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(repr(self.spec))

    def __repr__(self) -> str:
        return f"Merge({self.spec!r})"

    @property
    def counts_copies(self) -> bool:
        """True if a second copy of a payload changes the merged one, also in a field."""
        match self.op:
            case "append" | "count" | "sum":
                return True
            case "last" | "first" | "union" | "min" | "max":
                return False
            case "fields":
                return any(merge.counts_copies for merge in (*self.fields.values(), self.of("*")))

    def lift(self, payload: object, codec: Codec) -> bytes:
        """Convert one payload to an accumulator. Raises InvalidArgument if the policy cannot merge such a payload."""
        if self.raw:
            return codec.encode(payload)
        unit = pack(self._unit(payload, codec, "payload"))
        if self.op in ("fields", "union") and len(unit) > codec.max_bytes:
            problem = f"takes {len(unit):,} bytes; the limit is {codec.max_bytes:,}"
            raise TooLarge(
                "payload",
                type(payload),
                problem,
                f"Store it elsewhere and pass a reference, or raise {codec.limit_name}",
            )
        return unit

    def lower(self, acc: Any, decode: Callable[[bytes], Any]) -> Any:
        """Convert an accumulator (as unpacked from a message, strings as bytes) to a payload."""
        match self.op:
            case "last" | "first":
                return decode(acc)
            case "count":
                return acc[0]
            case "sum":
                return float(acc[0]) if acc[1] else acc[0]
            case "min" | "max":
                return decode(acc[1])
            case "append" | "union":
                return [decode(item) for item in self.items(acc)]
            case "fields":
                return {name: self.of(name).lower(part, decode) for name, part in self.parts(acc).items()}

    def check_shape(self, acc: Any) -> None:
        """Raise TypeError or ValueError unless an accumulator is one of this policy. Payloads are not decoded."""
        kinds: tuple[Any, ...] = ()
        match self.op:
            case "last" | "first":
                return
            case "count" | "sum":
                kinds = (int | float, int)
            case "min" | "max":
                kinds = (int | float, bytes)
            case "append":
                kinds = (int, int, bytes)
            case "union":
                kinds = (int, list)
            case "fields":
                if not isinstance(acc, dict) and acc != []:
                    raise TypeError("fields are no map")
                for name, part in self.parts(acc).items():
                    self.of(name).check_shape(part)
                return
        if not all(isinstance(value, kind) for value, kind in zip(acc, kinds, strict=True)):
            raise TypeError(f"not merged by {self.op!r}")
        self.lower(acc, len)

    def largest_value(self, acc: Any) -> int:
        """Return the bytes of the largest value that `lower` decodes."""
        match self.op:
            case "last" | "first":
                return len(acc)
            case "count" | "sum":
                return 0
            case "min" | "max":
                return len(acc[1])
            case "append" | "union":
                return max(map(len, self.items(acc)), default=0)
            case "fields":
                return max((self.of(name).largest_value(part) for name, part in self.parts(acc).items()), default=0)

    def count_dropped(self, acc: Any) -> int:
        """Return the number of items of an `append` or `union`, or of fields, beyond the limit."""
        match self.op:
            case "append":
                return int(acc[1])
            case "union":
                return int(acc[0])
            case "fields":
                own = cast("dict[bytes, Any]", acc).get(_DROPPED, 0) if isinstance(acc, dict) else 0
                return int(own) + sum(self.of(name).count_dropped(part) for name, part in self.parts(acc).items())
            case "last" | "first" | "count" | "sum" | "min" | "max":
                return 0

    @property
    def drops(self) -> bool:
        """True if the policy has a limit of items."""
        return self.op in ("append", "union", "fields")

    @property
    def has_items(self) -> bool:
        """True if the payload is a list of items."""
        return self.op in ("append", "union")

    def items(self, acc: Any) -> list[bytes]:
        """Return the encoded items of an append or a union."""
        return _items(acc[2]) if self.op == "append" else acc[1]

    def parts(self, acc: Any) -> dict[str, Any]:
        """Return the accumulator of each field: those with a policy in its order, then the others by name."""
        # Lua packs an empty table as an empty array, and the fields of another in any order.
        found = cast("dict[bytes, Any]", acc) if isinstance(acc, dict) else {}
        parts = {field.decode(): part for field, part in found.items() if field != _DROPPED}
        ordered = {field: parts.pop(field) for field in self.fields if field in parts}
        return ordered | dict(sorted(parts.items()))

    def of(self, field: str) -> Merge:
        """Return the policy of a field."""
        return self.fields.get(field) or cast(Merge, self.rest)

    def _unit(self, payload: object, codec: Codec, name: str) -> object:
        match self.op:
            case "last" | "first":
                return codec.encode(payload, name)
            case "count":
                return [1, 0]
            case "sum":
                return [_summand(payload, name), 1 if isinstance(payload, float) else 0]
            case "min" | "max":
                return [_number(payload, name, self.op), codec.encode(payload, name)]
            case "append":
                return [1, 0, pack(codec.encode(payload, name))]
            case "union":
                return self._set(payload, codec, name)
            case "fields":
                return self._units(payload, codec, name)

    def _units(self, payload: object, codec: Codec, name: str) -> object:
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
        items = list(dict.fromkeys(codec.encode_item(item, name) for item in cast("list[object]", payload)))
        cap = cast(int, self.spec["cap"])
        return [len(items[cap:]), items[:cap]]


MergeSpec: TypeAlias = Name | Merge | Mapping[str, "Name | Merge"]


def append(cap: int = 1000) -> Merge:
    """Return a policy that keeps all payloads in the order of their triggers.

    Args:
        cap: The maximum number of payloads, 1 to 100,000. At most 1 MiB is kept. The receipt of a later trigger is
            "dropped", and `delivery.dropped` counts it. It does not count towards `max_size`.
    """
    return Merge({"op": "append", "cap": _cap(cap), "bytes": MAX_BYTES})


def union(cap: int = 1000) -> Merge:
    """Return a policy that keeps the distinct items of all payloads, in the order of their first occurrence.

    Each payload is a list, tuple or set. Items are equal if their values and types are: 1 and 1.0 differ. The order
    within a dict does not matter. A dict comes back with its keys sorted, and a Decimal without trailing zeros.

    Args:
        cap: The maximum number of items, 1 to 100,000. At most 1 MiB is kept. Later ones are dropped and counted in
            `delivery.dropped`. The receipt of a trigger whose items are all dropped is "dropped".
    """
    return Merge({"op": "union", "cap": _cap(cap), "bytes": MAX_BYTES})


def merge_of(given: MergeSpec) -> Merge:
    """Return the policy for a `merge=` argument. Raises InvalidArgument.

    In a mapping, `"*"` is the policy of all other fields (default: last). A message keeps the first 1,000 of those
    fields. Later ones are dropped and counted in `delivery.dropped`.
    """
    if isinstance(given, Merge):
        return given
    fix = f"Use one of {', '.join(NAMES)}, or a dict of field -> policy"
    if isinstance(given, str):
        if given not in NAMES:
            raise InvalidArgument("merge", given, "no such merge policy", fix)
        return {"append": append, "union": union}.get(given, lambda: Merge({"op": given}))()
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgument("merge", given, "not a merge policy", fix)
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
    """Return the policy of a stored spec. Raises InvalidArgument, or KeyError or TypeError for an invalid spec."""
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
    if not -math.inf < value < math.inf or (isinstance(value, int) and abs(value) > EXACT):
        raise InvalidArgument(
            name, value, "not a number that merges exactly", "Use finite numbers, and integers up to 2**53"
        )
    return value


def _summand(value: object, name: str) -> int | float:
    number = _number(value, name, "sum")
    if abs(number) > MAX_SUMMAND:
        raise InvalidArgument(name, value, "its sum may overflow to infinity", "Use numbers of at most 1e290")
    return number


def pack(value: object) -> bytes:
    """Pack a value as msgpack for scripts."""
    # The raw type of old msgpack: cmsgpack of every Redis reads it as a string.
    return msgpack.packb(value, use_bin_type=False)


def _items(packed: bytes) -> list[bytes]:
    # Allow strings only: the header of another type could request gigabytes.
    unpacker = msgpack.Unpacker(
        raw=True, max_buffer_size=0, max_str_len=len(packed),
        max_array_len=0, max_map_len=0, max_bin_len=0, max_ext_len=0,
    )  # fmt: skip
    unpacker.feed(packed)
    return list(unpacker)
