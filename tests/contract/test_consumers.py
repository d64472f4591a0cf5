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
    @pytest.fixture
    def transport(self, live: Gate, url: str, raw: Any) -> Transport:
        return ChannelTransport(live, url, raw)
