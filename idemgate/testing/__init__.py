"""Tools for tests of programs that use idemgate.

A manual clock, a consistency check of a namespace, a run history, and the tests of a consumer. The history shows errors
that the store cannot show, such as overlapping runs.
"""

from idemgate.audit.findings import Finding, Report
from idemgate.testing.audit import audit
from idemgate.testing.clock import Clock
from idemgate.testing.contract import ConsumerContract, ContractConsumer, Transport, adapt_handler
from idemgate.testing.history import Event, History

__all__ = [
    "Clock", "ConsumerContract", "ContractConsumer", "Event", "Finding", "History", "Report", "Transport",
    "adapt_handler", "audit",
]  # fmt: skip
