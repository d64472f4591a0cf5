"""The consumer contract for topics, streams, lists and Pub/Sub channels."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport
from tests.contract.transports import ChannelTransport, ListTransport, StreamTransport, TopicTransport


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a read short: a stop waits for it."""
    monkeypatch.setattr("idemgate.subscribers.reader.BLOCK", 50)


class TestTopics(ConsumerContract):
    @pytest.fixture
    def transport(self, live: Gate, url: str, raw: Any) -> Transport:
        return TopicTransport(live, url, raw)


class TestStreams(ConsumerContract):
    @pytest.fixture
    def transport(self, live: Gate, url: str, raw: Any) -> Transport:
        return StreamTransport(live, url, raw)


class TestLists(ConsumerContract):
    @pytest.fixture
    def transport(self, live: Gate, url: str, raw: Any) -> Transport:
        return ListTransport(live, url, raw)


class TestChannels(ConsumerContract):
    # Pub/Sub redelivers no message
    test_a_completed_message_is_not_run_again_after_a_crash = None
    test_a_message_of_a_killed_consumer_runs_again = None
    test_a_message_in_progress_elsewhere_returns_later = None
    test_a_message_in_progress_elsewhere_is_no_failure = None
    test_a_failed_message_is_retried = None
    test_a_message_that_always_fails_becomes_a_dead_letter = None
    test_a_consumer_that_joins_or_leaves_loses_nothing = None

    @pytest.fixture
    def transport(self, live: Gate, url: str, raw: Any) -> Transport:
        return ChannelTransport(live, url, raw)
