"""Checks of the slot as a whole: its layout, the routing of its keys and the expiry of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from idemgate.audit.findings import Finding
from idemgate.audit.slot.view import SlotView, quote_name
from idemgate.core import keys
from idemgate.core.durations import LATEST_MS

__all__ = ["check_expiries", "check_layout", "check_routing"]


def check_layout(view: SlotView) -> Iterator[Finding]:
    if view.contents.meta and b"v" not in view.contents.meta:
        yield view.finding("layout", "meta", "the slot does not say of which layout it is", "HSETNX", b"v", b"3")


def check_routing(view: SlotView) -> Iterator[Finding]:
    """Check that each message belongs to this slot by its group or key, and by the slot count in the slot's name."""
    found = [(view.part_of(key), key, one.group) for key, one in view.pending.items()]
    found += [("leases", key, one.group) for key, one in view.inflight.items()]
    found += [("dead:data", one.key, one.message.group) for one in view.dead_data.values()]
    for part, key, group in found:
        right = keys.slot_of(group or key, view.slot.slots)
        if right != view.slot.number:
            yield view.finding(
                "wrong-slot", part, f"{quote_name(key)} belongs to slot {right}: nobody will find it here"
            )


def check_expiries(view: SlotView) -> Iterator[Finding]:
    """Check that replies expire, that the dedup keys live as long as their entries, and that other keys stay."""
    ends = [score for score in view.contents.dedup_expiry.values() if score <= LATEST_MS]
    lifetime = max(ends, default=0) - view.contents.now_ms
    for part, left in view.contents.lives.items():
        if part.startswith("replies") and left == -1:
            yield view.finding("no-expiry", part, "replies are remembered for ever", "PEXPIRE", 120_000)
        elif part.startswith("dedup") and left >= lifetime:
            continue
        elif not part.startswith("replies") and left >= 0:
            yield view.finding("expires", part, f"it will be gone in {left / 1000:.0f} s", "PERSIST")
