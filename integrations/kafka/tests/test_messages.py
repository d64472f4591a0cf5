"""`KafkaMessage`, and the headers of copies."""

from __future__ import annotations

from idemgate_kafka import KafkaMessage
from idemgate_kafka.message import build_headers, due_ms, restore_origin

from idemgate.errors import AttemptsExhausted
from tests.for_each import for_each


def test_headers_are_text_and_the_last_one_of_a_name_counts() -> None:
    message = KafkaMessage("orders", 3, 17, raw_headers=(("id", b"a"), ("id", b"b"), ("raw", b"\xff\x00")))
    assert message.headers == {"id": "b", "raw": "\\xff\x00"}
    assert message.id == "orders:3:17"


def test_a_copy_keeps_the_headers_and_replaces_its_own() -> None:
    message = KafkaMessage("orders", 3, 17, raw_headers=(("id", b"a"), ("id", b"b"), ("idemgate-error", b"old")))
    error = AttemptsExhausted("a", attempts=3)
    error.__cause__ = ValueError("no\nstock\ud800")
    assert build_headers(message, error, attempt=2, due=5) == (
        ("id", b"a"), ("id", b"b"), ("idemgate-origin", b"orders:3:17"),
        ("idemgate-error", b"ValueError: no ... stock\\ud800"), ("idemgate-attempt", b"2"), ("idemgate-due", b"5"),
    )  # fmt: skip
    assert build_headers(message, None) == (("id", b"a"), ("id", b"b"), ("idemgate-origin", b"orders:3:17"))


@for_each(
    ("headers", "place", "due"),
    [
        ((("idemgate-origin", b"orders:3:17"), ("idemgate-due", b"5")), ("orders", 3, 17), 5),
        ((), ("retries", 0, 1), 0),
        ((("idemgate-origin", b"orders:3"), ("idemgate-due", b"soon")), ("retries", 0, 1), 0),
        ((("idemgate-origin", b":3:17"), ("idemgate-due", b"-5")), ("retries", 0, 1), 0),
        ((("idemgate-origin", b"orders:\xff:17"),), ("retries", 0, 1), 0),
        ((("idemgate-origin", b"orders:3:" + b"9" * 5000), ("idemgate-due", b"9" * 5000)), ("retries", 0, 1), 0),
    ],
)
def test_a_copy_is_read_as_the_record_that_came_first(
    headers: tuple[tuple[str, bytes], ...], place: tuple[str, int, int], due: int
) -> None:
    copy = KafkaMessage("retries", 0, 1, raw_headers=headers)
    restored = restore_origin(copy)
    assert (restored.topic, restored.partition, restored.offset, due_ms(copy)) == (*place, due)
