"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from idemgate_kafka import KafkaConsumer

from tests.readmes import MINUTES, install, read_readme, run, run_until_printed
from tests.tansu import running_tansu

HERE = Path(__file__).parents[1]
README, (INSTALL, PROGRAM, COMMAND, *_) = read_readme(__file__)
EXPECTED = ["charged o-1", "charged o-2"]


def run_program(python: object, folder: Path, servers: str, env: dict[str, str]) -> list[str]:
    """Run the program; return the lines that it printed, sorted."""
    assert COMMAND == "python shop.py\n"
    assert PROGRAM.count('"localhost:9092"') == 1
    (folder / "shop.py").write_text(PROGRAM.replace("localhost:9092", servers))
    return sorted(run_until_printed(2, python, "-W", "error", "shop.py", cwd=folder, env=env).splitlines())


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path) -> None:
    with running_tansu(tmp_path) as servers:
        assert run_program(sys.executable, tmp_path, servers, {**os.environ}) == EXPECTED


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    scripts, env = install(INSTALL, tmp_path)
    (call,) = re.findall(r'python -c "(.*)"\)', INSTALL)
    assert Path(run(scripts / "python", "-c", call, env=env).strip()).name.startswith("tansu")
    with running_tansu(tmp_path) as servers:
        assert run_program(scripts / "python", tmp_path, servers, env) == EXPECTED


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    lines = run(sys.executable, "-W", "error", HERE / "example.py").splitlines()
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
        "gate, key = Gate('redis://x'), '{message.id}'\n"
        f"KafkaConsumer(gate, {settings}, 'orders', print, key=key, scope='s', dead_topic=None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
