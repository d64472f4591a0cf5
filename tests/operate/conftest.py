"""A store with something of each kind, and the command `idemgate` on it, in this process."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from idemgate import Gate, Trigger
from idemgate.cli import main
from idemgate.testing import Clock


class Ran(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]


SEARCHES = {"SCAN", "KEYS", "SSCAN", "HSCAN", "ZSCAN"}


def sent(raw: Any, act: Callable[[], object]) -> set[str]:
    """The commands that the server gets while `act` runs, of all clients."""
    with raw.monitor() as monitor:
        act()
        raw.echo("the end")
        commands = set[str]()
        while "ECHO" not in commands:
            commands.add(monitor.next_command()["command"].split(" ", 1)[0].upper())
    return commands


@pytest.fixture
def command(url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("topic", "ls", as_user=url)` runs `idemgate topic ls` on the namespace of this test."""

    def run(*words: str, as_user: str = url) -> Ran:
        capsys.readouterr()
        end = words.index("--") if "--" in words else len(words)
        try:
            code = main([*words[:end], "--url", as_user, "--namespace", namespace, *words[end:]])
        except SystemExit as end:  # of argparse
            code = int(str(end.code))
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def gate(url: str, raw: Any, namespace: str, sound: Callable[[Gate], None]) -> Iterator[Gate]:
    """A gate by the server's clock, as the command has one. Audited at the end."""
    with Gate(url, namespace=namespace) as made:
        yield made
        sound(made)
    raw.flushdb()


@pytest.fixture
def filled(gate: Gate, url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Topic "jobs": "waits" is due in an hour, "grouped" in group "g", "runs" is in flight, "bad" and "worse" are dead
    letters. Topic "empty". Guarded keys: "done" in the scope "first", "twice" in two scopes, "runs" is claimed, and
    "held" and "held too" wait for a decision. The file "letters" holds the dead letter "gone", which was deleted."""
    topic = gate.topic("jobs")
    topic.trigger("gone", {"n": 0})
    topic.bury("gone", reason="no")
    [gone] = topic.dead.list()
    monkeypatch.chdir(tmp_path)
    Path("letters").write_text(json.dumps({"stored": b64encode(gone.stored).decode()}) + "\n")
    topic.dead.delete([gone.id])
    topic.trigger_many([Trigger("bad", {"n": 1}), Trigger("worse", {"n": 2})])
    for delivery in topic.take(2):
        topic.bury(delivery, reason=f"ValueError: {delivery.key}")
    topic.trigger("runs", 1)
    topic.take(1)
    topic.trigger("waits", {"n": 3}, delay="1h", version=7)
    topic.trigger("grouped", 1, delay="1h", group="g")
    gate.topic("empty").open()
    gate.first("done", "1h")
    gate.first("twice", "1h")
    gate.claim("twice").complete("result")
    gate.claim("runs", lease="1h")
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 3600)) as earlier:  # its leases have ended
        for key in ("held", "held too"):
            earlier.claim(key, lease="1s", on_lease_loss="hold")
    return gate


@pytest.fixture
def stored(raw: Any) -> Callable[[], dict[bytes, bytes]]:
    """`stored()`: all keys of the server and what they hold."""
    return lambda: {key: raw.dump(key) for key in raw.scan_iter("*")}
