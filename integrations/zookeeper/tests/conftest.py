"""A real ZooKeeper server for the tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from idemgate import Gate
from tests.needs import report_missing
from tests.ports import free_ports
from tests.waiting import stop_group

SCRIPTS = [Path("/usr/share/zookeeper/bin/zkServer.sh"), *map(Path, filter(None, [shutil.which("zkServer.sh")]))]
TICK_MS = 200


class Server:
    """ZooKeeper, with ticks of 200 ms. From `away` to `back` it stands still, as behind a network that drops all."""

    def __init__(self, script: Path, folder: Path) -> None:
        (port,) = free_ports()
        self.hosts = f"127.0.0.1:{port}"
        config = folder / "zk.cfg"
        config.write_text(
            f"tickTime={TICK_MS}\nminSessionTimeout={2 * TICK_MS}\nmaxSessionTimeout=60000\nadmin.enableServer=false\n"
            f"dataDir={folder / 'data'}\nclientPortAddress=127.0.0.1\nclientPort={port}\n"
        )
        environment = {
            **os.environ, "ZOO_LOG_DIR": str(folder), "ZOOCFGDIR": str(folder), "JMXDISABLE": "true",
            "SERVER_JVMFLAGS": "-Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        }  # fmt: skip
        with (folder / "out").open("wb") as out:
            command = ["bash", str(script), "start-foreground", str(config)]
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._wait_until_it_serves(port, folder / "out")

    def _wait_until_it_serves(self, port: int, out: Path) -> None:
        # The port accepts connections before the server serves: until then it closes each one.
        deadline = time.monotonic() + 30
        while not self._serves(port):
            assert self._process.poll() is None, f"ZooKeeper ended: {out.read_text()}"
            assert time.monotonic() < deadline, f"ZooKeeper does not serve: {out.read_text()}"
            time.sleep(0.05)

    def _serves(self, port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"srvr")
                return b"Mode:" in connection.makefile("rb").read()
        except OSError:
            return False

    def away(self) -> None:
        stop_group(self._process.pid)

    def back(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.back()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = next(filter(Path.exists, SCRIPTS), None)
    if script is None or shutil.which("java") is None:
        report_missing("zookeeper")
    made = Server(script, tmp_path_factory.mktemp("zookeeper"))
    yield made
    made.stop()


@pytest.fixture
def gate() -> Gate:
    """Its store is never asked."""
    return Gate("redis://127.0.0.1:1", timeout="10s")
