"""luacheck finds a name that is undefined or unused in a script. `poe lint` runs it on all of them."""

from __future__ import annotations

import shutil

import pytest

from idemgate import lua
from tests.needs import report_missing
from tools import luacheck


@pytest.fixture(autouse=True)
def _needed() -> None:
    if not shutil.which("luacheck"):
        report_missing("luacheck")


@pytest.mark.parametrize(
    ("file", "before", "after", "told"),
    [
        ("guard/renew", "id then", "ib then", "accessing undefined variable 'ib'"),
        ("guard/renew", "local key", "local other\nlocal key", "unused variable 'other'"),
        ("lib/fence", "local function", "local function one() end\nlocal function", "unused function 'one'"),
    ],
)
def test_a_name_without_a_meaning_is_found(
    file: str, before: str, after: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = lua.source, lua.source(file)
    assert before in text
    line = text.partition(before)[0].count("\n") + 1
    monkeypatch.setattr(lua, "source", lambda name: text.replace(before, after) if name == file else source(name))
    assert f"{file}:{line}: {told}" in luacheck.findings(["guard/renew", "guard/claim"])


def test_without_luacheck_nothing_is_checked_unless_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("IDEMGATE_NEED", raising=False)
    assert luacheck.main() == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv("IDEMGATE_NEED", "postgresql,luacheck")
    assert luacheck.main() == 1
