"""Partial success: which items of a merged payload failed, and the accumulator of just those."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from idemgate.core.codec import Codec, canonical
from idemgate.errors import InvalidArgument
from idemgate.topics.merge import Merge, wrapped

__all__ = ["Part", "listed", "part_of"]


class Part(NamedTuple):
    """What failed of a payload: its accumulator, how many items these are, and of how many."""

    acc: Any
    items: int
    of: int

    def packed(self, failure: str) -> bytes:
        """As `lua/lib/part.lua` takes it."""
        return wrapped((failure, self.items, self.acc))


def part_of(merge: Merge, acc: Any, items: object, codec: Codec, name: str = "items") -> Part:
    """The part of a payload that `items` names; InvalidArgument, blaming `name`, for what is not in it and for a merge policy
    without items.

    - append and union: some of the payload's items, in any order; they stay in the payload's. Of equal items as many
      are meant as are named. Items are equal when they are stored the same: 1 and 1.0 are two.
    - per field: names of fields, each meant whole; or a mapping of field -> what failed of it, items of an append or
      union, or `...` for all of the field.
    """
    op = merge.spec["op"]
    if op == "append":
        found = merge.items(acc)
        kept = _named(found, items, codec, name)
        return Part([len(kept), 0, b"".join(map(wrapped, kept))], len(kept), len(found))
    if op == "union":
        found = merge.items(acc)
        kept = _named(found, items, codec, name)
        return Part([0, kept], len(kept), len(found))
    if op == "fields":
        return _fields(merge, acc, items, codec, name)
    raise InvalidArgument(
        name, items, f'merge="{op}" keeps no items that could fail by themselves',
        "Raise any other error, or nack without items, for all of it; of a field that failed say ... (all of it)",
    )  # fmt: skip


def listed(items: object) -> list[Any] | None:
    """What was named, each name of a mapping; None for what is no collection."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        return None
    return list(cast("Iterable[object]", items))


def _named(found: list[bytes], items: object, codec: Codec, name: str) -> list[bytes]:
    """Those of the stored items that are named, in their order. Compared as values: the order of a dict or a set may
    have changed."""
    named = None if isinstance(items, Mapping) else listed(cast(Any, items))
    if named is None:
        raise InvalidArgument(
            name, cast(Any, items), "not a list, tuple or set of items", "Name those that failed, as in [x]"
        )
    places: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for place, one in enumerate(found):
        places[canonical(codec.decode(one))].append(place)
    chosen: list[int] = []
    for item in named:
        left = places.get(canonical(item, name))
        if not left:
            raise InvalidArgument(name, item, "not an item of this payload", "Name items as delivery.payload has them")
        chosen.append(left.popleft())
    return [found[place] for place in sorted(chosen)]


def _fields(merge: Merge, acc: Any, items: object, codec: Codec, name: str) -> Part:
    parts = merge.parts(acc)
    failed: dict[str, Part] = {}
    for field, said in _by_field(items, parts, name).items():
        policy, part = merge.of(field), parts[field]
        if said is ...:
            failed[field] = Part(part, _size(policy, part), 0)
        else:
            failed[field] = part_of(policy, part, said, codec, f"{name}[{field!r}]")
    kept = {field: part.acc for field, part in failed.items() if part.items}
    of = sum(_size(merge.of(field), part) for field, part in parts.items())
    return Part(kept, sum(part.items for part in failed.values()), of)


def _by_field(items: object, known: Mapping[str, object], name: str) -> dict[str, object]:
    """What is said of each field that is named."""
    named = listed(items)
    if named is None:
        raise InvalidArgument(
            name, items, "neither names of fields nor a mapping", 'Name the fields that failed, as in ["a"]'
        )
    for field in named:
        if not isinstance(field, str) or field not in known:
            raise InvalidArgument(
                name, field, "not a field of this payload", f"It has {', '.join(sorted(known)) or 'none'}"
            )
    return {field: items[field] if isinstance(items, Mapping) else ... for field in named}


def _size(policy: Merge, acc: Any) -> int:
    """A field counts as one item, and one that keeps items, as those."""
    return max(1, len(policy.items(acc))) if policy.itemized else 1
