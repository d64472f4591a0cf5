"""Tools for tests of programs that use idemgate.

A manual clock, a consistency check of a namespace, a run history, and the tests of a consumer. The history shows errors
that the store cannot show, such as overlapping runs.
"""

from idemgate.audit.findings import Finding, Report
from idemgate.testing.assertions import assert_merged, assert_ran_once
from idemgate.testing.audit import audit
from idemgate.testing.bridge import HandlerBridge
from idemgate.testing.clock import Clock
from idemgate.testing.contract import ConsumerContract, ContractConsumer, Transport, adapt_handler
from idemgate.testing.drain import drain
from idemgate.testing.history import Event, History
from idemgate.testing.override import override
from idemgate.testing.proxy import Proxy
from idemgate.testing.server import delete_keys, temporary_server
from idemgate.worker.drain import Drainable, Drained, Ran

__all__ = [
    "Clock", "ConsumerContract", "ContractConsumer", "Drainable", "Drained", "Event", "Finding", "HandlerBridge",
    "History", "Proxy", "Ran", "Report", "Transport", "adapt_handler", "assert_merged", "assert_ran_once", "audit",
    "delete_keys", "drain", "override", "temporary_server",
]  # fmt: skip
