"""All checks of one slot."""

from __future__ import annotations

from idemgate.audit.findings import Finding
from idemgate.audit.slot.groups import check_group_queues, check_groups
from idemgate.audit.slot.leases import check_leases, check_rate, check_tokens
from idemgate.audit.slot.memory import check_dead_letters, check_dedup_expiry, check_event_ids, check_versions
from idemgate.audit.slot.routing import check_expiries, check_layout, check_routing
from idemgate.audit.slot.schedule import check_copies, check_placements, check_scores, check_unplaced
from idemgate.audit.slot.view import SlotView

__all__ = ["check_slot"]


def check_slot(view: SlotView) -> list[Finding]:
    """Run every check on a slot.

    A closed slot has been moved, so it must be empty unless its topic is `changing`.
    """
    found = view.contents
    if found.closed:
        moving = view.topic and view.topic.changing
        messages = len(found.pending) + len(found.in_flight) + len(found.dead_data)
        what = f"the slot is closed and holds {messages} messages, and nobody changes the number of slots"
        return [] if moving or not messages else [Finding("closed", view.slot.key("meta"), what)]
    checks = (
        check_layout, check_placements, check_unplaced, check_leases, check_rate, check_dead_letters,
        check_dedup_expiry, check_versions, check_event_ids, check_groups, check_group_queues, check_tokens,
        check_copies, check_scores, check_routing, check_expiries,
    )  # fmt: skip
    return [*view.unreadable, *(finding for check in checks for finding in check(view))]
