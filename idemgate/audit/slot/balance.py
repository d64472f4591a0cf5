"""The balance of accepted triggers: each has ended or is still stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from idemgate.audit.findings import Finding
from idemgate.audit.slot.view import SlotView

__all__ = ["balance", "check_balance"]

_ENDED = ("acked", "cancelled", "deleted", "expired", "forwarded")


def balance(view: SlotView) -> int | None:
    """Return the accepted triggers that are not accounted for in this slot; None if an entry is corrupt.

    No script changes this number. Resharding moves counters and messages separately, so only the sum over all slots
    of a topic has to be 0. Each slot may be read at another time.
    """
    if view.unreadable:
        return None
    gone = sum(view.meta.get(b"%s_triggers" % end.encode(), 0) for end in _ENDED)
    held: int = sum(one.triggers for one in view.pending.values())
    held += sum(one.message.triggers for part in (view.inflight, view.dead_data) for one in part.values())
    missing: int = view.meta.get(b"accepted", 0) - gone - held
    return missing


def check_balance(topic: str, key: str, balances: Sequence[int | None]) -> Iterator[Finding]:
    """Check that every accepted trigger of a topic is accounted for.

    Does nothing if a slot could not be decoded, which is another finding.
    """
    missing = 0 if None in balances else sum(filter(None, balances))
    if missing > 0:
        yield Finding("conservation", key, f"topic {topic!r}: {missing} accepted triggers neither ended nor are held")
    elif missing:
        yield Finding("conservation", key, f"topic {topic!r}: {-missing} more than accepted ended or are held")
