"""Partial failure: the items of a merged payload that failed, and the accumulator of just those."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from idemgate.core.codec import Codec, canonical
from idemgate.errors import InvalidArgument
from idemgate.topics.merge import Merge, pack

__all__ = ["FailedItems", "select_items", "to_list"]


class FailedItems(NamedTuple):
    """The failed items of a payload: their accumulator, their number, and the number of all items."""

    acc: Any
    items: int
    of: int

    def pack(self, failure: str) -> bytes:
        """Return the failed items in the format of `topics/scripts/lib/slot/settle_deliveries.lua`."""
        return pack((failure, self.items, self.acc))


def select_items(merge: Merge, acc: Any, items: object, codec: Codec, name: str = "items") -> FailedItems:
    """Return the part of a payload that `items` names.

    - append and union: some of the payload's items, in any order. They keep the payload's order. An item listed twice
      means two equal items. Items are equal if their values and types are: 1 and 1.0 differ.
    - per field: names of fields, each meant as a whole; or a mapping of field to its failed items. The items are those
      of an append or union, or `...` for the whole field.

    Raises InvalidArgument, for the parameter `name`, if an item is not in the payload or the merge policy has none.
    """
    if merge.has_items:
        stored = merge.items(acc)
        failed = _match_items(stored, items, codec, name)
        return FailedItems(_accumulate(merge, failed), len(failed), len(stored))
    if merge.op == "fields":
        return _select_fields(merge, acc, items, codec, name)
    raise InvalidArgument(
        name, items, f'merge="{merge.op}" keeps no items that could fail by themselves',
        "Raise any other error, or nack without items, for all of it; of a field that failed say ... (all of it)",
    )  # fmt: skip


def _accumulate(merge: Merge, items: list[bytes]) -> list[Any]:
    """Return the accumulator of encoded items, of which none was dropped."""
    return [len(items), 0, b"".join(map(pack, items))] if merge.op == "append" else [0, items]


def _select_all(merge: Merge, acc: Any) -> FailedItems:
    """Return the whole accumulator of an append or union. Items that were dropped do not return."""
    items = merge.items(acc)
    return FailedItems(_accumulate(merge, items), max(1, len(items)), 0)


def to_list(items: object) -> list[Any] | None:
    """Return the items of a collection, or the keys of a mapping. None if it is no collection."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        return None
    return list(cast("Iterable[object]", items))


def _match_items(stored: list[bytes], items: object, codec: Codec, name: str) -> list[bytes]:
    """Return the stored items that are named, in their stored order.

    They are compared in canonical form, because the order within a dict or a set may have changed.
    """
    named = None if isinstance(items, Mapping) else to_list(cast(Any, items))
    if named is None:
        raise InvalidArgument(
            name, cast(Any, items), "not a list, tuple or set of items", "Name those that failed, as in [x]"
        )
    positions: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for position, item in enumerate(stored):
        for form in {canonical(codec.decode(item)), canonical(codec.decode_stored(item))}:  # as a dict, or as a model
            positions[form].append(position)
    selected: set[int] = set()
    for item in named:
        remaining = positions.get(canonical(item, name), deque())
        while remaining and remaining[0] in selected:  # it was named in its other form
            remaining.popleft()
        if not remaining:
            raise InvalidArgument(name, item, "not an item of this payload", "Name items as delivery.payload has them")
        selected.add(remaining.popleft())
    return [stored[position] for position in sorted(selected)]


def _select_fields(merge: Merge, acc: Any, items: object, codec: Codec, name: str) -> FailedItems:
    parts = merge.parts(acc)
    failed: dict[str, FailedItems] = {}
    for field, named in _items_by_field(items, parts, name).items():
        policy, part = merge.of(field), parts[field]
        if named is ... and policy.has_items:
            failed[field] = _select_all(policy, part)
        elif named is ...:
            failed[field] = FailedItems(part, 1, 0)
        else:
            failed[field] = select_items(policy, part, named, codec, f"{name}[{field!r}]")
    accs = {field: part.acc for field, part in failed.items() if part.items}
    of = sum(_count_items(merge.of(field), part) for field, part in parts.items())
    return FailedItems(accs, sum(part.items for part in failed.values()), of)


def _items_by_field(items: object, known: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the failed items of each field that is named; `...` means the whole field."""
    named = to_list(items)
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


def _count_items(policy: Merge, acc: Any) -> int:
    """Return the number of items of a field. A field without items counts as one."""
    return max(1, len(policy.items(acc))) if policy.has_items else 1
