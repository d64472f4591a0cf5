"""The name of a process, as operators read it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from idemgate.core.process import process_name
from tests.for_each import for_each

CASES = {
    "/srv/app/worker.py": "worker.py",
    "/srv/app/mails/__main__.py": "mails",
    "/usr/bin/idemgate": "idemgate",
    "": "python",
    "x" * 300: "x" * 97 + "...",
    "\udcff": "\\udcff",
}


@for_each("path", CASES)
def test_a_process_is_named_by_its_program(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    assert process_name() == f"{CASES[path]}, pid {os.getpid()} on {socket.gethostname()[:100]}"


def test_a_process_without_arguments_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert process_name().startswith("python, pid")
