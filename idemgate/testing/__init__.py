"""For tests of programs that use idemgate: a clock that is moved instead of waited for, an auditor that reads a whole
namespace and says what is wrong with it, and a history of runs that shows what no store can."""

from idemgate.audit.findings import Finding, Report
from idemgate.testing.audit import audit
from idemgate.testing.clock import Clock
from idemgate.testing.history import Event, History

__all__ = ["Clock", "Event", "Finding", "History", "Report", "audit"]
