"""All checks of one slot."""

from __future__ import annotations

from idemgate.audit.findings import Finding
from idemgate.audit.slot.contents import Contents, Slot, TopicEntry
from idemgate.audit.slot.groups import check_group_queues, check_groups
from idemgate.audit.slot.leases import check_leases, check_rate, check_tokens
from idemgate.audit.slot.memory import check_dead_letters, check_dedup_expiry, check_event_ids, check_versions
from idemgate.audit.slot.routing import check_expiries, check_layout, check_routing
from idemgate.audit.slot.schedule import check_copies, check_placements, check_scores, check_unplaced
from idemgate.audit.slot.view import SlotView
from idemgate.core.codec import Codec

__all__ = ["check_slot"]


def check_slot(slot: Slot, found: Contents, topic: TopicEntry | None, codec: Codec) -> list[Finding]:
    """Run every check on a slot.

    A closed slot has been moved, so it must be empty unless its topic is `changing`.

    Args:
        slot: the name of the slot.
        found: its content.
        topic: the topic's registry entry; None if the registry has none that can be decoded.
        codec: decodes payloads.
    """
    if found.closed:
        return [] if (topic and topic.changing) or not _count_messages(found) else [_closed_with_messages(slot, found)]
    view = SlotView(slot, found, topic, codec)
    checks = (
        check_layout, check_placements, check_unplaced, check_leases, check_rate, check_dead_letters,
        check_dedup_expiry, check_versions, check_event_ids, check_groups, check_group_queues, check_tokens,
        check_copies, check_scores, check_routing, check_expiries,
    )  # fmt: skip
    return [*view.unreadable, *(finding for check in checks for finding in check(view))]


def _count_messages(found: Contents) -> int:
    return len(found.pending) + len(found.inflight) + len(found.dead_data)


def _closed_with_messages(slot: Slot, found: Contents) -> Finding:
    what = f"the slot is closed and holds {_count_messages(found)} messages, and nobody changes the number of slots"
    return Finding("closed", slot.key("meta"), what)
