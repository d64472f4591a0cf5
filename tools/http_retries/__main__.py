"""Retry requests to an application that was not written for idemgate, while its server is killed.

The application is the server of Prefect, from the package index, in its own environment: a FastAPI app with a database.
Only the middleware is added. Each created resource must exist once, or at most once more for each kill while it was
created: the server may die between its commit and the completion of the key. Exits with 1 if an answer differs, a
header of one caller reaches another, or a resource exists more often.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from idemgate.store.embedded.server import start
from tools.http_retries.client import KINDS, Client, Request

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("IDEMGATE_APPLICATIONS", Path.home() / ".cache" / "idemgate-applications"))
PACKAGES = ["prefect==3.8.8", "fastapi==0.139.0"]
"""Prefect 3.8 does not start with the newest FastAPI."""
SERVICES = ("CANCELLATION_CLEANUP", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "SCHEDULER")
"""Its loops in the background, which would only compete for the lock of the database."""
NEEDED = ["redis>=5.0.2", "wrapt>=1.16", "tenacity>=8.2.3", "msgpack>=1.1"]
QUERIES = {
    "flow_runs": "SELECT name, count(*) FROM flow_run GROUP BY name",
    "artifacts": "SELECT trim(data, '\"'), count(*) FROM artifact GROUP BY data",
    "automations": "SELECT name, count(*) FROM automation GROUP BY name",
}


def main() -> None:
    words = _parse_arguments()
    print(f"seed={words.seed}", flush=True)
    python = _make_environment()
    with tempfile.TemporaryDirectory() as folder, start() as store, _run_server(python, store.url, folder) as server:
        requests = _plan(words.requests)
        client = Client(server.url, _create_flow(server.url), words.seed, lambda: server.kills)
        killer = threading.Thread(target=_kill, args=(server, client, words))
        began = time.monotonic()
        killer.start()
        client.run(requests, words.threads)
        killer.join()
        seconds = time.monotonic() - began
        created = _count_resources(Path(folder) / "prefect.sqlite")
    sys.exit(_report(requests, created, server, client, seconds))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.http_retries", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="resources to create")
    parser.add_argument("--kills", type=int, default=50, help="how often the server is killed")
    parser.add_argument("--threads", type=int, default=8, help="clients at once")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    return parser.parse_args()


def _make_environment() -> str:
    """Return the Python of the environment, which is made once."""
    home = CACHE / "-".join(PACKAGES).replace("=", "")
    python = home / "bin" / "python"
    if not (home / "made").exists():
        print(f"making {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES, *NEEDED], check=True)
        (home / "made").touch()
    return str(python)


class Server:
    """The server as the client sees it: an address, and the process that serves it now."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pid = 0
        self.kills = 0

    def wait(self) -> None:
        """Wait until the server answers."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/api/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise TimeoutError("the server does not answer")


@contextmanager
def _run_server(python: str, store: str, folder: str) -> Iterator[Server]:
    """Run the server in its environment, and read which process serves."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        command = [python, str(Path(__file__).with_name("server.py")), str(listening.fileno()), store, "retries"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations" / "http")]),
            "PREFECT_HOME": folder,
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.sqlite",
            "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_UI_ENABLED": "false",
            **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in SERVICES},
        }
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[listening.fileno()],
        ) as process:
            threading.Thread(target=_read_pids, args=(process.stdout, server), daemon=True).start()
            try:
                server.wait()
                yield server
            finally:
                process.terminate()


def _read_pids(lines: Any, server: Server) -> None:
    for line in lines:
        server.pid = int(line)


def _create_flow(url: str) -> str:
    return str(httpx.post(f"{url}/api/flows/", json={"name": "retries"}, timeout=30).json()["id"])


def _plan(count: int) -> list[Request]:
    """Return the requests: two accounts, the same keys, other resources."""
    return [
        Request(number, KINDS[number // 2 % len(KINDS)], account, f"{account}-{number:06}-", f"key-{number // 2}")
        for number in range(count)
        for account in ["anna" if number % 2 else "bert"]
    ]


def _kill(server: Server, client: Client, words: argparse.Namespace) -> None:
    """Kill the server at a random moment after each share of the requests."""
    drawn = random.Random(words.seed)
    for number in range(words.kills):
        share = words.requests * (number + 1) // (words.kills + 1)
        while client.done < share:
            time.sleep(0.002)
        time.sleep(drawn.uniform(0, 0.1))
        server.kills += 1  # before, so that no request misses it
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


def _count_resources(database: Path) -> Counter[str]:
    """Return how often each marker was created."""
    found: Counter[str] = Counter()
    with closing(sqlite3.connect(database)) as connection:
        for query in QUERIES.values():
            found.update(dict(connection.execute(query).fetchall()))
    return found


def _report(requests: list[Request], created: Counter[str], server: Server, client: Client, seconds: float) -> int:
    """Print the figures and the faults. Return the exit code."""
    for request in requests:
        count = created[request.marker]
        if not 1 <= count <= 1 + request.kills:
            request.faults.append(f"created {count} times, with {request.kills} kills")
    twice = [request for request in requests if created[request.marker] > 1]
    attempts, lost = sum(one.attempts for one in requests), sum(one.lost for one in requests)
    replays, faulty = sum(one.replays for one in requests), [one for one in requests if one.faults]
    print(f"requests={len(requests)} attempts={attempts} lost={lost} kills={server.kills} seconds={seconds:.0f}")
    print(f"copies={replays} statuses={dict(sorted(client.statuses.items()))}")
    print(f"created once={len(requests) - len(twice)} more than once, inside the window={len(twice)}")
    print(f"requests with a wrong answer, header or number of resources={len(faulty)}")
    for request in faulty[:20]:
        print(request)
    return 1 if faulty else 0


if __name__ == "__main__":
    main()
