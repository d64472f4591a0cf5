"""The page for operators: a Starlette app that shows what runs, and offers every verb of the table."""

from idemgate.ui.access import CHANGES, READS, Access, AccessCallback, Format
from idemgate.ui.api import app

__all__ = ["CHANGES", "READS", "Access", "AccessCallback", "Format", "app"]
