"""A plugin of pytest for Python in Node: what that Python cannot do is skipped, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]

LACKS = {
    "no valkey-server or redis-server found": "a server",
    "can't start new thread": "a thread",
    "does not support processes": "a process",
    "Function not implemented": "a process",
    "stack switching not supported": "an event loop",
    "cannot be called from a running event loop": "an event loop",
    "No module named": "a library",
}
IGNORED = ("test_models.py", "test_registering.py")
"""They import pydantic and celery, of which there is no build for this Python."""


def pytest_ignore_collect(collection_path: Any) -> bool | None:
    return True if collection_path.name in IGNORED else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(item, "obj", item))):
            item.add_marker(pytest.mark.skip("needs an event loop"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        shown = str(call.excinfo.getrepr(chain=True))
        missing = next((thing for text, thing in LACKS.items() if text in shown), None)
        if missing is not None:
            report.outcome = "skipped"
            report.longrepr = (str(report.fspath), 0, f"needs {missing}")
    return report
