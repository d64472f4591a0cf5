"""The night (`tools/night`): its table is complete, and quick kinds hold."""

from __future__ import annotations

import shutil

import pytest

from tests.needs import report_missing
from tools.night.incidents import INCIDENTS
from tools.night.judging import run

pytest.importorskip("prometheus_client")


def test_the_night_has_the_promised_incidents() -> None:
    assert len(INCIDENTS) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forgotten-pause", "evicting-server"])
def test_an_incident_is_found_and_mended(kind: str) -> None:
    if not (shutil.which("prometheus") and shutil.which("redis-cli")):
        report_missing("prometheus")
    result = run(kind, 0, quick=True)
    assert not result.problem
    assert result.commands
