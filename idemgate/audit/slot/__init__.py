"""Consistency checks of one slot of a topic.

`read_slot` reads a slot in one step. The checks state what holds between any two scripts, with the names of
`topics/scripts/lib/slot/slot.lua`.
"""

from __future__ import annotations

from idemgate.audit.slot.balance import balance, check_balance
from idemgate.audit.slot.check import check_slot
from idemgate.audit.slot.contents import Contents, Slot, SlotTooLarge, TopicEntry, decode_topic_entry, read_slot
from idemgate.audit.slot.leases import AHEAD_US, LEASE_MS, token_problem
from idemgate.audit.slot.view import SlotView, format_time, quote_name

__all__ = [
    "AHEAD_US",
    "LEASE_MS",
    "Contents",
    "Slot",
    "SlotTooLarge",
    "SlotView",
    "TopicEntry",
    "balance",
    "check_balance",
    "check_slot",
    "decode_topic_entry",
    "format_time",
    "quote_name",
    "read_slot",
    "token_problem",
]
