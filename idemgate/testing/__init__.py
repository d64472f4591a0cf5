"""Tools for tests of programs that use idemgate: a manual clock, a consistency check of a namespace, and a run history.

The history shows errors that the store cannot show, such as overlapping runs.
"""

from idemgate.audit.findings import Finding, Report
from idemgate.testing.audit import audit
from idemgate.testing.clock import Clock
from idemgate.testing.history import Event, History

__all__ = ["Clock", "Event", "Finding", "History", "Report", "audit"]
