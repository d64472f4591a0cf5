"""A queue of files with visibility timeouts, as in SQS: a transport of the consumer contract, with faults to plant.

A message is one JSON file. A consumer hides it for `VISIBILITY` when it receives it, and deletes it to acknowledge it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any, Literal

from idemgate import Gate
from idemgate.testing import Transport
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler

__all__ = ["FAULTS", "FileFault", "FileTransport"]

VISIBILITY = 1.2
"""The seconds for which a received message is hidden."""
FileFault = Literal[
    "none", "acknowledged before the run", "no redelivery", "hot loop", "receives count as failures",
    "dropped when it fails", "duplicates are returned", "not kept", "prefetched without a guard", "lost when it leaves",
]  # fmt: skip
FAULTS: dict[FileFault, set[str]] = {
    "acknowledged before the run": {"test_a_message_of_a_killed_consumer_runs_again"},
    "no redelivery": {"test_a_message_of_a_killed_consumer_runs_again"},
    "hot loop": {"test_a_message_in_progress_elsewhere_returns_later"},
    "receives count as failures": {"test_a_message_in_progress_elsewhere_is_no_failure"},
    "dropped when it fails": {
        "test_a_failed_message_is_retried",
        "test_a_message_that_always_fails_becomes_a_dead_letter",
    },
    "duplicates are returned": {"test_copies_run_once"},
    "not kept": {"test_a_message_stays_invisible_while_it_runs"},
    "prefetched without a guard": {"test_prefetched_messages_that_expire_run_once"},
    "lost when it leaves": {"test_a_consumer_that_joins_or_leaves_loses_nothing"},
}
"""Faults of a consumer, and tests of the contract that must find each of them."""


class FileTransport(Transport):
    visibility = VISIBILITY

    def __init__(self, gate: Gate, folder: Path, fault: FileFault = "none") -> None:
        super().__init__(gate)
        self.folder, self.fault = folder, fault
        self.sent = 0
        (folder / "dead").mkdir()

    async def publish(self, message_id: str, body: bytes) -> None:
        self.sent += 1
        message = {"id": message_id, "body": base64.b64encode(body).decode(), "visible": 0.0, "attempts": 0}
        self.write(self.folder / f"{self.sent:06}.json", message)

    def write(self, path: Path, message: dict[str, Any]) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(message))
        partial.rename(path)

    def receive(self) -> tuple[Path, dict[str, Any]] | None:
        """Hide the first visible message and return it."""
        for path in sorted(self.folder.glob("*.json")):
            message = json.loads(path.read_text())
            if message["visible"] <= time.time():
                hidden = 3600 if self.fault == "no redelivery" else VISIBILITY
                message |= {"visible": time.time() + hidden, "attempts": message["attempts"] + 1}
                self.write(path, message)
                return path, message
        return None

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> FileConsumer:
        return FileConsumer(self, handler, acknowledges)

    async def is_empty(self) -> bool:
        return not [*self.folder.glob("*.json")]

    async def list_dead_letters(self) -> list[bytes]:
        return [base64.b64decode(json.loads(path.read_text())["body"]) for path in (self.folder / "dead").iterdir()]


class FileConsumer:
    """Receives up to eight messages and runs four of them. Those that wait may expire meanwhile."""

    def __init__(self, transport: FileTransport, handler: Handler, acknowledges: bool) -> None:
        self.transport, self.handler, self.acknowledges = transport, handler, acknowledges
        self.guard = transport.gate.guard(SCOPE, lease=LEASE)
        self.places = asyncio.Semaphore(4)
        self.running = set[asyncio.Task[None]]()
        self.killed = self.stopped = False
        self.loop = asyncio.create_task(self._consume())

    async def _consume(self) -> None:
        while True:
            while len(self.running) < 8 and (received := self.transport.receive()) is not None:
                task = asyncio.create_task(self._handle(*received))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
                await asyncio.sleep(0)
            await asyncio.sleep(0.005)

    async def _handle(self, path: Path, message: dict[str, Any]) -> None:
        fault, body = self.transport.fault, base64.b64decode(message["body"])
        if fault == "acknowledged before the run":
            self._delete(path)
        key = self.transport.count(message["id"])

        async def keep(seconds: float) -> None:
            if not self.killed:
                self._hide(path, message, seconds)

        async with self.places:
            if self.stopped:
                return  # it becomes visible again
            verdict = await self.guard.aio.run(
                f"{key} {message['attempts']}" if fault == "prefetched without a guard" else key,
                self.handler, key, body, fingerprint=body, keep=None if fault == "not kept" else keep,
            )  # fmt: skip
        if verdict.action == "ack" and not (fault == "duplicates are returned" and verdict.outcome == "duplicate"):
            self._delete(path)
        elif verdict.outcome == "in_progress":
            message["attempts"] -= fault != "receives count as failures"
            self._settle(path, message, 0 if fault == "hot loop" else verdict.delay(0.05))
        elif verdict.action == "reject" or (message["attempts"] >= MAX_ATTEMPTS and verdict.outcome == "failed"):
            self._bury(path, message)
        elif fault == "dropped when it fails":
            self._delete(path)
        else:
            self._settle(path, message, verdict.delay(0.05))

    def _settle(self, path: Path, message: dict[str, Any], delay: float) -> None:
        """Show the message again after the delay, or bury it if its attempts are used up."""
        if message["attempts"] >= MAX_ATTEMPTS:
            self._bury(path, message)
        elif self.acknowledges:
            self._hide(path, message, delay)

    def _hide(self, path: Path, message: dict[str, Any], seconds: float) -> None:
        if path.exists():
            self.transport.write(path, message | {"visible": time.time() + seconds})

    def _bury(self, path: Path, message: dict[str, Any]) -> None:
        self.transport.write(self.transport.folder / "dead" / path.name, message)
        self._delete(path)

    def _delete(self, path: Path) -> None:
        if self.acknowledges and not self.killed:
            path.unlink(missing_ok=True)

    async def stop(self) -> None:
        self.loop.cancel()
        self.stopped = True
        for path in self.transport.folder.glob("*.json") if self.transport.fault == "lost when it leaves" else ():
            path.unlink()
        while self.running:
            await asyncio.wait(self.running)

    async def kill(self) -> None:
        self.killed = True
        self.loop.cancel()
        for task in self.running:
            task.cancel()
        await self.stop()
