"""The blocks of the README, as a sender and a receiver run them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from idemgate_webhook import BadSignature, History, sign

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(block: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a block on the embedded server, without its worker."""
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    found: dict[str, Any] = {"__name__": "block"}
    exec(block.replace("redis://localhost:6379/0", "embedded://").replace("\ngate.run()", ""), found)
    return found


def test_the_block_of_the_sender_runs(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(BLOCKS[0], secret, monkeypatch)
    assert isinstance(found["webhooks"].history("evt_17:acme"), History)
    found["gate"].close()


def test_the_block_of_the_receiver_runs(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(BLOCKS[1], secret, monkeypatch)
    sent_at, body = int(time.time()), b"{}"
    headers = {
        "webhook-id": "evt_1",
        "webhook-timestamp": str(sent_at),
        "webhook-signature": sign(secret, "evt_1", sent_at, body),
    }
    for _ in range(2):
        found["receive"](SimpleNamespace(headers=headers, body=body))
    assert found["gate"].counters["once.done"] == 1
    with pytest.raises(BadSignature):
        found["receive"](SimpleNamespace(headers=headers, body=b"[]"))
    found["gate"].close()
