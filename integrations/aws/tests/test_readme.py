"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.readmes import MINUTES, install, read_readme, run, run_until_printed
from tests.waiting import wait_until

HERE = Path(__file__).parents[1]
README, (INSTALL, PROGRAM, COMMAND, *_) = read_readme(__file__)
SETTINGS = dict(re.findall(r"(AWS_\w+)=(\S+)", INSTALL))
PRINTED = ["charged", "charged", "o-1", "o-2"]


def run_program(python: object, folder: Path, endpoint: str, env: dict[str, str]) -> list[str]:
    """Run the program; return the words that it printed, sorted. Its threads print at the same time."""
    assert COMMAND == "python shop.py\n"
    (folder / "shop.py").write_text(PROGRAM)
    env = {**env, **SETTINGS, "AWS_ENDPOINT_URL": endpoint}
    printed = run_until_printed(2, python, "-W", "error", "shop.py", cwd=folder, env=env)
    return sorted(re.findall("charged|o-[0-9]", printed))


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path, endpoint: str) -> None:
    assert run_program(sys.executable, tmp_path, endpoint, {**os.environ}) == PRINTED


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    scripts, env = install(INSTALL, tmp_path)
    (port,) = free_ports()
    moto = subprocess.Popen([str(scripts / "moto_server"), "-p", str(port)], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: not socket.create_connection(("127.0.0.1", port), 1).close(), not_yet=(OSError,))
        found = run_program(scripts / "python", tmp_path, f"http://127.0.0.1:{port}", env)
    finally:
        moto.kill()
        moto.wait()
    assert found == PRINTED


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    assert run(sys.executable, "-W", "error", HERE / "example.py").splitlines() == [
        "o-1 charged",
        "o-2 the bank is busy: it comes again",
        "o-2 charged",
        "copies dropped: 1",
        "dead letter: idemgate.errors.Bury: the account is closed",
        'receipt for ["o-1"]',
    ]


def test_the_readme_names_each_counter_and_log_event() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (HERE / "idemgate_aws").glob("*.py"))
    names: set[str] = set(re.findall(r"(?:add\(|log\.\w+\(\s*)\"((?:sqs|lambda)\.\w+)", source))
    assert len(names) >= 6
    assert [name for name in names if f"`{name}" not in README] == []


@pytest.mark.slow
def test_the_package_needs_no_client(tmp_path: Path) -> None:
    # The runtime of Lambda has boto3, and a function without a client needs none
    blocked = "import sys; sys.modules.update(boto3=None, botocore=None, aiobotocore=None); import idemgate_aws"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=60)
