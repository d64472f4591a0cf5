"""A real RabbitMQ of this test process, and a queue of its own for each test."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pika
import pytest
from idemgate_rabbitmq import AioPublisher, Publisher
from pika.exceptions import AMQPError

from idemgate import Gate
from idemgate.testing import Clock
from tests.conftest import (  # noqa: F401 - rows of docs/reliability.md
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    record_fault,
)
from tests.needs import report_missing
from tests.ports import free_ports
from tests.waiting import stop_group

# Not the one on PATH, which changes to the user of the system's service.
SCRIPTS = [Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), *map(Path, filter(None, [shutil.which("rabbitmq-server")]))]
_numbers = itertools.count()


class Broker:
    """RabbitMQ with a name, ports and folders of its own. From `away` to `back` it stands still, as behind a network
    that drops all; `kill` is a power cut, after which `start` finds what was on its disk."""

    def __init__(self, script: Path, folder: Path) -> None:
        self._script, self._folder = script, folder
        self.port, distribution, names = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/?heartbeat=5"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\ndisk_free_limit.absolute = 10MB\n"
            "log.file = false\nlog.console = true\nlog.console.level = warning\n"
        )
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),  # the cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RUNNING_UNDER_SYSTEMD": "yes",  # the script becomes the broker, instead of waiting for it
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }
        # In the foreground: the processes that Erlang starts would outlive the tests.
        self._names = subprocess.Popen(["epmd", "-address", "127.0.0.1", "-port", str(names)])
        self.start()

    def start(self) -> None:
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                ["sh", str(self._script)], env=self._environment, cwd=self._folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + 240
        while not self._answers():
            log = (self._folder / "out").read_text()[-4000:]
            assert self._process.poll() is None, f"RabbitMQ ended: {log}"
            assert time.monotonic() < deadline, f"RabbitMQ does not answer: {log}"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(b"AMQP\0\0\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False

    def connect(self) -> Any:
        return pika.BlockingConnection(pika.URLParameters(self.url))

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def away(self) -> None:
        stop_group(self._process.pid)

    def back(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close_connections(self) -> None:
        """As an administrator would. `rabbitmqctl` does the same after it has started an Erlang of its own."""
        cookie = (self._folder / ".erlang.cookie").read_text().strip()
        command = ["erl_call", "-n", self._environment["RABBITMQ_NODENAME"], "-c", cookie, "-a"]
        command.append('rabbit_networking close_all_connections ["test"]')
        subprocess.run(command, env=self._environment, check=True, capture_output=True, timeout=60)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.kill()
        self._names.kill()
        self._names.wait()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    script = next(filter(Path.exists, SCRIPTS), None)
    if script is None or shutil.which("epmd") is None:
        report_missing("rabbitmq")
    made = Broker(script, tmp_path_factory.mktemp("rabbitmq"))
    yield made
    made.stop()


class Queue:
    """A durable queue on a connection of its own, which is made anew when the broker was away."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker, self.name = broker, name
        self._connection: Any = None
        self.channel.queue_declare(name, durable=True)

    @property
    def channel(self) -> Any:
        if self._connection is not None:
            with suppress(AMQPError):
                self._connection.process_data_events(0)
        if self._connection is None or self._connection.is_closed:
            self._connection = self.broker.connect()
            self._channel = self._connection.channel()
        return self._channel

    def get(self, within: float = 20) -> tuple[Any, Any, bytes]:
        """The next message, acknowledged: (method, properties, body)."""
        end = time.monotonic() + within
        while (got := self.channel.basic_get(self.name, auto_ack=True))[0] is None:
            assert time.monotonic() < end, "no message came"
            time.sleep(0.01)
        return got

    def all(self) -> list[tuple[Any, Any, bytes]]:
        """What is in it now."""
        found = []
        while (got := self.channel.basic_get(self.name, auto_ack=True))[0] is not None:
            found.append(got)
        return found

    def close(self) -> None:
        self.channel.queue_delete(self.name)
        self._connection.close()


@pytest.fixture
def make_queue(broker: Broker) -> Iterator[Callable[[], Queue]]:
    made: list[Queue] = []

    def make() -> Queue:
        made.append(Queue(broker, f"q{os.getpid()}-{next(_numbers)}"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def queue(make_queue: Callable[[], Queue]) -> Queue:
    return make_queue()


@pytest.fixture(params=["aio", "blocking"])
def publisher_of(request: pytest.FixtureRequest) -> type[AioPublisher | Publisher]:
    """Each behaviour with both clients."""
    return AioPublisher if request.param == "aio" else Publisher


@pytest.fixture
async def publish(publisher_of: Any, broker: Broker) -> AsyncIterator[Callable[..., Any]]:
    """`publisher = publish(exchange, ...)`: closed in the end."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(publisher_of(options.pop("url", broker.url), *args, **options))
        return made[-1]

    yield make
    for one in made:
        closing = one.close()
        if closing is not None:
            await closing


@pytest.fixture
async def gate(store: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    made = Gate(store, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Starts a script of this folder as a process of its own."""

    def start_script(name: str, *args: str, **options: Any) -> subprocess.Popen[str]:
        script = Path(__file__).with_name(name)
        return subprocess.Popen([sys.executable, str(script), *args], text=True, **options)

    return start_script
