"""Names in a store may come from anyone. What commands print of them has no control characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idemgate import Gate
from idemgate.cli import main
from idemgate.core.text import one_line, printable
from tests.for_each import for_each

ESCAPES = "\x1b[2J\x07\x9b31m\x7f\r\u202etxt\ud800"
"""It clears the screen, rings, colours, deletes, returns, and turns the direction of text around."""
NAMESPACE = "printed"


@pytest.fixture
def foreign(raw: Any) -> Iterator[Callable[[str, Any], None]]:
    """Writes keys of the namespace that idemgate did not write, and deletes them."""
    written: list[bytes] = []

    def write(key: str, value: Any) -> None:
        name = key.encode(errors="surrogatepass")
        written.append(name)
        raw.hset(name, mapping=value) if isinstance(value, dict) else raw.set(name, value)

    yield write
    for name in written:
        raw.delete(name)
    for name in raw.scan_iter(f"ig2:{{{NAMESPACE}:*"):
        raw.delete(name)


def check_printed(text: str) -> None:
    assert [char for char in text if not char.isprintable() and char != "\n"] == []


@pytest.mark.damages("foreign")
def test_the_doctor_prints_no_control_characters(
    url: str, foreign: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    # Given keys in the namespace whose names a terminal would act on, one with the end of a line
    foreign(f"ig2:{{{NAMESPACE}:{ESCAPES}}}", "x")
    foreign(f"ig2:{{{NAMESPACE}:once:s:a\nall is well", "x")
    foreign(f"ig1:{{{NAMESPACE}:{ESCAPES}}}", "x")  # another layout, which the doctor names without --audit
    for words in (["--audit"], []):
        main(["doctor", "--url", url, "--namespace", NAMESPACE, *words])
        printed = capsys.readouterr().out
        check_printed(printed)
        assert "\\x1b[2J" in printed
        assert "all is well" not in printed.splitlines()
    # Then JSON has them in full
    main(["doctor", "--url", url, "--namespace", NAMESPACE, "--audit", "--json"])
    text = capsys.readouterr().out
    check_printed(text)
    assert any("\x1b[2J" in finding["key"] for finding in json.loads(text)["audit"]["findings"])


def test_the_list_of_topics_and_errors_print_none(
    url: str, raw: Any, foreign: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    registry = f"ig2:{{{NAMESPACE}:topics}}"
    with Gate(url, namespace=NAMESPACE) as gate:
        gate.topic("t").open()
    foreign(registry, {ESCAPES.encode(errors="ignore"): raw.hget(registry, "t")})
    assert main(["topic", "ls", "--url", url, "--namespace", NAMESPACE]) == 0
    printed = capsys.readouterr().out
    check_printed(printed)
    assert "\\x1b[2J" in printed
    main(["topic", "delete", f"no{ESCAPES}", "--yes", "--url", url, "--namespace", NAMESPACE])
    foreign(registry, {f"{ESCAPES.encode(errors='ignore').decode()} to": "x"})
    assert main(["topic", "ls", "--url", url, "--namespace", NAMESPACE]) == 1
    check_printed(capsys.readouterr().err)


@for_each(
    ("text", "shown"),
    [
        ("plain \u00e9 \u65e5", "plain \u00e9 \u65e5"),
        ("two\nlines", "two\nlines"),
        ("\x1b[0m", "\\x1b[0m"),
        ("\x9b\x7f\t\r", "\\x9b\\x7f\\t\\r"),
        ("\u202e\ud800", "\\u202e\\ud800"),
        ("", ""),
    ],
)
def test_what_a_terminal_acts_on_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(text) == shown.replace("\n", "\\n")


def test_a_text_that_cannot_be_had_is_shown_by_its_type() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert one_line(Broken()) == "<Broken>"
