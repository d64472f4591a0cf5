"""`idemgate once KEY -- COMMAND`: a guard for cron and shell scripts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from idemgate.cli import main
from idemgate.core.keys import record
from tests.cli.conftest import Command
from tests.waiting import wait_until

Once = Callable[..., Command]


@pytest.fixture
def once(start: Any, url: str, namespace: str) -> Once:
    """`once("KEY", "--", "command", ...)` starts the command."""

    def once(*words: str, **environment: str) -> Command:
        return start("once", "--url", url, "--namespace", namespace, *words, **environment)  # type: ignore[no-any-return]

    return once


@pytest.fixture
def theirs(url: str, namespace: str) -> Iterator[Gate]:
    with Gate(url, namespace=namespace) as gate:
        yield gate


def python(text: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", text)


def test_the_first_call_runs_the_command_and_a_later_one_says_so(once: Once, theirs: Gate, tmp_path: Path) -> None:
    # Given a command that ran
    command = ("--", "sh", "-c", 'echo "$0 $*" | tee -a ran; echo careful >&2', "-x", "--", "--lease")
    assert once("k", *command).end() == (0, "-x -- --lease\n", "careful\n")
    # When it is called again
    code, out, err = once("k", *command).end()
    # Then it does not run
    assert (code, out, err) == (0, "", "idemgate: 'k' is done already: the command was not run\n")
    assert (tmp_path / "ran").read_text() == "-x -- --lease\n"
    # And its output is not stored
    record = theirs.inspect("k", scope="command")
    assert (record.state, record.value) == ("done", None)
    assert 86_000 < (record.retention_left or 0) <= 86_400
    # And another scope has another key
    assert once("--scope", "other", "--retention", "1h", "k", *command).end()[0] == 0
    assert (theirs.inspect("k", scope="other").retention_left or 0) <= 3600


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (python("raise SystemExit(3)"), 3),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), 137),
        (("--", "no-such-command"), 127),
        (("--", "/"), 126),
    ],
    ids=["failed", "killed", "not found", "not executable"],
)
@pytest.mark.one_in(3)
def test_the_exit_code_is_passed_on_and_a_failure_releases_the_key(
    once: Once, theirs: Gate, command: tuple[str, ...], expected: int
) -> None:
    code, _, err = once("k", *command).end()
    assert code == expected
    assert err.startswith("idemgate: [Errno") is (expected in (126, 127))
    assert theirs.inspect("k", scope="command").state == "released"
    with theirs.claim("k", scope="command", lease="30s"):
        pass  # the next call has it


def test_a_command_that_runs_elsewhere_is_not_run_or_waited_for(once: Once, theirs: Gate) -> None:
    # Given a key that another process runs
    with theirs.claim("k", scope="command", lease="30s") as claim:
        # When it is called again, then it does not run
        code, out, err = once("k", *python("print('ran')")).end()
        assert (code, out) == (75, "")
        assert err == "idemgate: 'k' is in progress elsewhere: the command was not run\n"
        # And one that waits runs once the key is free
        waiting = once("--wait", "30s", "k", *python("print('ran')"))
        wait_until(lambda: theirs.context.link.command("PUBSUB", "NUMSUB", record(theirs.namespace, "command", "k"))[1])
        claim.release()
        assert waiting.end() == (0, "ran\n", "")


def test_the_lease_is_renewed_while_the_command_runs(once: Once, theirs: Gate, tmp_path: Path) -> None:
    # Given a command that runs until a file is there, with a lease of one second
    text = "import os, time\nprint('began', flush=True)\nwhile not os.path.exists('end'): time.sleep(0.01)"
    running = once("--lease", "1s", "k", *python(text))
    running.read_until("began")
    # When more renewals have been made than a lease lasts for
    seen = [0.0]

    def renewals() -> int:
        seen.append(theirs.inspect("k", scope="command").lease_left or 0)
        return sum(after > before for before, after in pairwise(seen))

    wait_until(lambda: renewals() > 8)
    # Then it still has its key
    assert once("k", *python("")).end()[0] == 75
    (tmp_path / "end").touch()
    assert running.end()[0] == 0
    assert theirs.inspect("k", scope="command").attempts == 1


SLOW_SIGNALS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGHUP, signal.SIGUSR1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, *SLOW_SIGNALS])
def test_a_signal_is_passed_on_and_the_command_decides(once: Once, theirs: Gate, number: signal.Signals) -> None:
    # Given a command that ends with 7 after a signal
    text = (
        f"import signal, sys, threading\nsignal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('began', flush=True)\nwhile True: threading.Event().wait(60)"
    )
    running = once("k", *python(text))
    running.read_until("began")
    # When this command gets the signal
    running.process.send_signal(number)
    # Then it ends as the other one does, and the key is free
    assert running.end()[0] == 7
    assert theirs.inspect("k", scope="command").state == "released"


def test_without_a_store_the_command_is_not_run(once: Once, tmp_path: Path) -> None:
    code, out, err = once("--url", "redis://127.0.0.1:1", "k", *python("print('ran')")).end()
    assert (code, out) == (75, "")
    assert err.startswith("idemgate: the command was not run: ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "Write -- before the command"),
        (("k",), "Write -- before the command"),
        (("k", "--"), "Write -- before the command"),
        (("k", "echo", "-n", "hi"), "Write -- before the command"),
        (("", "--", "true"), "idemgate"),
        (("--retention", "0", "k", "--", "true"), "--retention"),
    ],
    ids=["nothing", "no command", "an empty command", "no --", "an empty key", "a bad duration"],
)
def test_a_wrong_command_line_ends_with_2(
    url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    try:
        code: object = main(["once", "--url", url, *words])
    except SystemExit as end:  # of argparse
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert problem in err


@pytest.mark.slow
def test_a_key_is_printed_escaped(once: Once) -> None:
    key = "k\x1b[31m\n"
    assert once(key, "--", "true").end()[0] == 0
    assert "\x1b" not in once(key, "--", "true").end()[2]
