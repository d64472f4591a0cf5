"""A test without its server is skipped, or fails where the server must be there. Both say how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import PACKAGES, report_missing


@pytest.mark.parametrize("server", PACKAGES)
def test_without_its_server_a_test_is_skipped_or_fails(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IDEMGATE_NEED", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"apt-get install .* {PACKAGES[server]}"):
        report_missing(server)
    monkeypatch.setenv("IDEMGATE_NEED", ",".join(PACKAGES))
    with pytest.raises(pytest.fail.Exception, match=f"apt-get install .* {PACKAGES[server]}"):
        report_missing(server)


def test_the_script_of_ci_installs_and_names_each_server() -> None:
    script = (Path(__file__).parents[2] / ".ci/brokers").read_text()
    assert f"echo {','.join(PACKAGES)}\n" in script
    words = script.replace("(", " ").replace(")", " ").split()
    assert [package for packages in PACKAGES.values() for package in packages.split() if package not in words] == []
