"""Checks of groups: their members and the messages that wait for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgpack

from idemgate.audit.findings import Finding
from idemgate.audit.slot.view import SlotView, is_group_corrupt, placements, quote_name

__all__ = ["check_group_queues", "check_groups"]


def check_groups(view: SlotView) -> Iterator[Finding]:
    """Check that a group holds its keys in flight or between two attempts, and stays within its limit."""
    between = {key for part, _, key in placements(view) if part != "group:waiting"}
    in_flight = defaultdict[bytes, list[bytes]](list)
    for key, one in view.inflight.items():
        in_flight[one.group].append(key)
    for group, members in view.group_active.items():
        distinct = dict.fromkeys(members)
        own = dict.fromkeys(
            key
            for key in distinct
            if _is_member(view, "inflight", key, group) or (key in between and _is_member(view, "pending", key, group))
        )
        # Keys in flight that the group lacks belong into the repaired value, or another key could run beside them.
        held = own | dict.fromkeys(in_flight[group])
        mend = ("HSET", group, msgpack.packb([*held], use_bin_type=False)) if held else ("HDEL", group)
        for key in distinct:
            if key not in own:
                holds = f"group {quote_name(group)} holds {quote_name(key)}"
                what = f"{holds}, which is neither in flight nor between two attempts"
                yield view.finding("held", "group:active", what, *mend)
        if len(distinct) < len(members):
            what = f"group {quote_name(group)} holds a key more than once: {', '.join(map(quote_name, members))}"
            yield view.finding("held", "group:active", what, *mend)
        limit = view.topic.group_limit if view.topic else len(own)
        if len(own) > limit:
            yield view.finding(
                "overlap", "group:active", f"group {quote_name(group)} holds {len(own)} keys, it may hold {limit}"
            )
    for key, one in view.inflight.items():
        if one.group and key not in view.group_active.get(one.group, ()) and not is_group_corrupt(view, one.group):
            flies = f"{quote_name(key)} is in flight"
            what = f"{flies}, and its group {quote_name(one.group)} does not know: another may run beside"
            yield view.finding("overlap", "inflight", what)


def _is_member(view: SlotView, part: str, key: bytes, group: bytes) -> bool:
    """Return True if the part has the key and the key belongs to the group. A corrupt entry counts as a member."""
    one = getattr(view, part).get(key)
    keys = view.contents.in_flight if part == "inflight" else view.contents.pending
    return key in keys and (one is None or one.group == group)


def check_group_queues(view: SlotView) -> Iterator[Finding]:
    """Check that messages wait only for a full group, counting the keys admitted and not yet taken."""
    limit = view.topic.group_limit if view.topic else 1
    scheduled, queues = defaultdict[bytes, list[bytes]](list), defaultdict[bytes, list[bytes]](list)
    for part, _, key in placements(view):
        if part != "group:waiting" and key in view.pending:
            scheduled[view.pending[key].group].append(key)
    for group, _, key in view.group_waiting.values():
        queues[group].append(key)
    for group, queue in sorted(queues.items()):
        members = {*view.group_active.get(group, ()), *scheduled[group]}
        waiting = [quote_name(key) for key in queue[:4]]
        if not members and not is_group_corrupt(view, group):
            what = f"{', '.join(waiting[:3])}{' ...' if waiting[3:] else ''} stands behind group {quote_name(group)}"
            yield view.finding("stuck", "group:waiting", f"{what}, which is empty: nothing will let it in")
        elif len(members) < limit and not is_group_corrupt(view, group):
            yield view.finding(
                "room", "group:waiting", f"group {quote_name(group)} has room for {limit - len(members)} of its line"
            )
