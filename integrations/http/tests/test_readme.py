"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_ports
from tests.readmes import MINUTES, install, read_readme, run

HERE = Path(__file__).parents[1]
README, (INSTALL, PROGRAM, COMMANDS, *_) = read_readme(__file__)


def read_request(line: str, port: int) -> dict[str, Any]:
    """Return the request of a line with curl."""
    found = re.fullmatch(r"curl -i -X POST \"localhost:8000(\S+)\"((?: -H '[^']+')+)", line)
    assert found is not None, line
    headers = dict(field.split(": ", 1) for field in re.findall(r"-H '([^']+)'", found[2]))
    return {"url": f"http://127.0.0.1:{port}{found[1]}", "headers": headers}


def send_requests(python: str, folder: Path, cwd: Path, env: dict[str, str]) -> list[httpx.Response]:
    """Serve the program of the README as its commands say, and send their requests."""
    (folder / "shop.py").write_text(PROGRAM)
    serve, *lines = COMMANDS.strip().splitlines()
    assert serve == "uvicorn shop:app &"
    (port,) = free_ports()
    command = [python, "-m", "uvicorn", "shop:app", "--port", str(port), "--app-dir", str(folder)]
    with subprocess.Popen(command, cwd=cwd, env=env, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    return [httpx.post(**read_request(line, port), timeout=30) for line in lines]
                except httpx.ConnectError:
                    assert time.monotonic() < until
                    time.sleep(0.02)
        finally:
            server.terminate()


def check_answers(answers: list[httpx.Response]) -> None:
    first, second = answers
    assert (first.status_code, first.text) == (second.status_code, second.text) == (201, '{"payment":1}')
    assert (first.headers.get("idempotent-replayed"), second.headers["idempotent-replayed"]) == (None, "true")
    assert '`201 {"payment":1}`' in README


def read_sources() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (HERE / "idemgate_http").rglob("*.py"))


def test_the_readme_names_each_counter_each_log_event_and_each_option() -> None:
    from idemgate_http import AsgiOptions
    from idemgate_http.problems import PROBLEMS

    sources = read_sources()
    events = set(re.findall(r'\blog\.[a-z]+\(\s*"(http\.[a-z_]+)', sources))
    counters = set(re.findall(r'counters\.add\(\s*"http\.([a-z_]+)"', sources)) | {"lost", "unguarded"}
    counters |= {name.replace("-", "_") for name in PROBLEMS}
    table = README[README.index("## Counters and logs") :]
    assert {*re.findall(r"^\| `(http\.[a-z_]+)` \| (?:warning|error)", table, re.MULTILINE)} == events
    listed = set(re.findall(r"`(?:http)?\.([a-z_]+)`", table))
    assert counters <= listed
    assert listed <= counters | {event.removeprefix("http.") for event in events}
    assert all(f"`{name}`" in README for name in PROBLEMS)
    options = {name for base in AsgiOptions.__mro__ for name in getattr(base, "__annotations__", ())}
    options |= {*AsgiOptions.__annotations__}
    assert {name for name in options if f"`{name}" not in README} == set()


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path) -> None:
    check_answers(send_requests(sys.executable, tmp_path, tmp_path, dict(os.environ)))


async def test_the_effect_in_a_database_happens_once_when_redis_lost_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the program of the README with an inbox
    monkeypatch.chdir(tmp_path)
    (block,) = [one for one in re.findall(r"^```py\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "key_for" in one]
    shop: dict[str, Any] = {}
    exec(PROGRAM + block, shop)
    transport = httpx.ASGITransport(shop["app"])
    with closing(sqlite3.connect("shop.db")) as db:
        db.execute("CREATE TABLE credits (account TEXT, amount INTEGER)")
        headers = {"X-Account": "anna", "Idempotency-Key": '"order-7"'}
        # When a request is sent again after Redis has lost all
        async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=headers) as client:
            first = await client.post("/credits?account=anna&amount=5")
            shop["gate"].context.link.command("FLUSHALL")
            second = await client.post("/credits?account=anna&amount=5")
        # Then its answer is the same, and the effect happened once
        assert (first.status_code, second.status_code) == (201, 201)
        assert first.json() == second.json()
        assert "idempotent-replayed" not in second.headers
        assert db.execute("SELECT * FROM credits").fetchall() == [("anna", 5)]
    await shop["gate"].aio.close()
    shop["gate"].close()


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    scripts, env = install(INSTALL, tmp_path)
    python = scripts / "python"
    check_answers(send_requests(str(python), tmp_path, tmp_path, env))
    code = "import idemgate_http.webhooks, idemgate_http.wsgi, sys; print(sorted({'django', 'flask'} & {*sys.modules}))"
    assert run(python, "-c", code, env=env, cwd=tmp_path) == "[]\n"


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    lines = run(sys.executable, "-W", "error", HERE / "example.py").splitlines()
    assert lines[0].startswith("anna key=order-7 amount=5: 201 {'payment': 1} ['set-cookie']")
    assert lines[1].startswith("anna key=order-7 amount=5: 201 {'payment': 1} ['idempotent-replayed']")
    assert sum("A request is outstanding" in line for line in lines[2:5]) == 2
    assert "422 Idempotency-Key is already used" in lines[5]
    assert lines[6].startswith("bert key=order-7 amount=5: 201 {'payment': 3}")
    assert "400 Idempotency-Key is missing" in lines[7]
    assert lines[8] == "payments made: [5, 6, 5]"
