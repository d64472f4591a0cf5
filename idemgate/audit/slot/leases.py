"""Checks of leases, fencing tokens and the rate limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from idemgate.audit.findings import Finding, quote_argument
from idemgate.audit.slot.view import SlotView, format_time, quote_name

__all__ = ["AHEAD_US", "LEASE_MS", "check_leases", "check_rate", "check_tokens", "token_problem"]

LEASE_MS = 7 * 86_400_000
"""The maximum valid lease in ms if the slot does not record its longest lease."""
AHEAD_US = 86_400_000_000
"""The maximum lead of a token over the clock, in us. Tokens start at the clock and rise by one per grant."""
_YEAR_US = 366 * 86_400_000_000


def check_leases(view: SlotView) -> Iterator[Finding]:
    term = view.meta.get(b"term", 0)
    now, latest = 1000 * (view.contents.now_ms - term), _latest_lease_end(view)
    for key in view.contents.inflight.keys() - view.contents.leases.keys():
        what = f"{quote_name(key)} has a delivery and no lease: it will never lapse"
        mend = f"ZADD {quote_argument(view.slot.key('leases'))} {now} {quote_argument(key)}"
        yield Finding("orphan", view.slot.key("inflight"), what, mend)
    for key, start in view.contents.leases.items():
        end = start / 1000 + term
        if end > latest and key in view.contents.messages:
            ends = f"the lease of {quote_name(key)} ends at {format_time(end)}"
            what = f"{ends}, and none of this slot can after {format_time(latest)}"
            mend = f"ZADD {quote_argument(view.slot.key('leases'))} {now} {quote_argument(key)}"
            yield Finding("lease", view.slot.key("leases"), f"{what}: it comes back too late if its owner dies", mend)


def _latest_lease_end(view: SlotView) -> int:
    """Return the latest valid end of a lease in ms: the time of the last token plus the longest lease used.

    Every grant and heartbeat sets the token to its own time in us, rounded down by less than 1 ms.
    """
    granted = [view.meta.get(b"fence", 0), *(one.fence for one in view.inflight.values())]
    longest = view.meta.get(b"lease", 0)
    return max(granted) // 1000 + longest + 1 if longest > 0 else view.contents.now_ms + LEASE_MS


def check_rate(view: SlotView) -> Iterator[Finding]:
    """Check that the rate limit does not block for over a year. An earlier rate may have set the time."""
    latest = 1000 * view.contents.now_ms + max(_YEAR_US, view.topic.rest_us if view.topic else 0)
    if (until := view.meta.get(b"rate", 0)) > latest:
        what = f"the rate lets nothing be taken before {format_time(until / 1000)}"
        yield view.finding("lease", "meta", what, "HDEL", b"rate")


def check_tokens(view: SlotView) -> Iterator[Finding]:
    """Check that the last token is the highest known, and that a key has no token twice."""
    last = view.meta.get(b"fence", 0)
    if problem := token_problem(last, view.contents.now_ms * 1000):
        yield view.finding("fence", "meta", f"the slot's last token {problem}")
    granted = [(one.fence, "leases", key) for key, one in view.inflight.items()]
    granted += [(one.fence, "dead:data", one.key) for one in view.dead_data.values()]
    unread = b"fence" in view.contents.meta and b"fence" not in view.meta
    for fence, part, key in granted:
        if fence > last and not unread:
            what = f"{quote_name(key)} has token {fence}, the slot's last one is {last or 'missing'}"
            yield view.finding("fence", "meta", f"{what} ({part})", "HSET", "fence", max(one[0] for one in granted))
    for (fence, key), times in Counter((fence, key) for fence, _, key in granted).items():
        if times > 1:
            yield view.finding("fence", "leases", f"{quote_name(key)} was granted token {fence} {times} times")


def token_problem(token: int, now_us: int) -> str:
    """Return what is wrong with a token that cannot have been granted yet; "" for a valid token."""
    if not 0 <= token < 2**53:
        return f"is {token}: scripts count exactly up to 2^53 only"
    if token > now_us + AHEAD_US:
        return f"is {token}, more than a day ahead of the clock, which says {now_us}"
    return ""
