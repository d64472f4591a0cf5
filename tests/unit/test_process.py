"""The name of a process, as operators read it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from idemgate.core.calls import PROCESS_BYTES
from idemgate.core.process import actor_name, operated_by, process_name
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


@for_each(
    ("who", "named"),
    {"ann@example.com": "ann@example.com", "ann@desk": "ann@desk ", "x" * 300: "x" * 247 + "...", "": None}.items(),
)
def test_an_operator_is_named_instead_of_the_process(who: str, named: str | None) -> None:
    with operated_by(who):
        assert actor_name() == (named or process_name())
        assert len(actor_name()) > PROCESS_BYTES  # what has 8 bytes is read as the id of a process
    assert actor_name() == process_name()


def test_a_process_without_arguments_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert process_name().startswith("python, pid")
