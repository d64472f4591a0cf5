"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.aws.tests.conftest import free_port
from tests.waiting import wait_until
from tools.compat import wheels

HERE = Path(__file__).parents[1]
README = (HERE / "README.md").read_text(encoding="utf-8")
INSTALL, PROGRAM, COMMAND = re.findall(r"^```(?:sh|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:3]
SETTINGS = dict(re.findall(r"(AWS_\w+)=(\S+)", INSTALL))
MINUTES = 5
PRINTED = ["charged", "charged", "o-1", "o-2"]


def run_program(python: object, folder: Path, endpoint: str, env: dict[str, str]) -> list[str]:
    """Run the program until it has printed two lines; return the words that it printed until its end, sorted.

    Its threads print at the same time, so their words may be mixed.
    """
    assert COMMAND == "python shop.py\n"
    (folder / "shop.py").write_text(PROGRAM)
    env = {**env, **SETTINGS, "AWS_ENDPOINT_URL": endpoint}
    with (folder / "out").open("w+") as out:
        program = subprocess.Popen([str(python), "-W", "error", "shop.py"], cwd=folder, env=env, stdout=out)
        try:
            wait_until(lambda: (folder / "out").read_text().count("\n") >= 2 or program.poll() is not None)
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        finally:
            program.kill()
            program.wait()
    return sorted(re.findall("charged|o-[0-9]", (folder / "out").read_text()))


def test_the_first_block_runs(tmp_path: Path, endpoint: str) -> None:
    assert run_program(sys.executable, tmp_path, endpoint, {**os.environ}) == PRINTED


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    def run(*command: object) -> None:
        subprocess.run([str(each) for each in command], check=True, cwd=tmp_path, timeout=MINUTES * 60)

    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    core, aws = wheels.build(tmp_path / "wheels", "idemgate-redis", "idemgate-aws")
    assert INSTALL.startswith('pip install ".[embedded]" "./integrations/aws[boto3]" "moto[server]" ')
    scripts = tmp_path / "venv" / "bin"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    run(
        uv, "pip", "install", "--quiet", "--python", scripts / "python", f"{core}[embedded]", f"{aws}[boto3]",
        "moto[server]",
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    port = free_port()
    moto = subprocess.Popen([str(scripts / "moto_server"), "-p", str(port)], env=env, stderr=subprocess.DEVNULL)
    try:
        found = run_program(scripts / "python", tmp_path, f"http://127.0.0.1:{port}", env)
    finally:
        moto.kill()
        moto.wait()
    assert found == PRINTED


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "example.py")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.splitlines() == [
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
