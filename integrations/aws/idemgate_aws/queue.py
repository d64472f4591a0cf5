"""The requests to one queue of SQS, by a client of boto3 or of aiobotocore."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from idemgate import InvalidArgument
from idemgate_aws.message import SqsMessage, build_dead_letter

__all__ = [
    "BATCH", "LONGEST", "RefusedBySqs", "SqsQueue", "check_client", "check_url", "is_unanswered", "naming_missing",
]  # fmt: skip

BATCH = 10
"""The most messages of one request to SQS."""
LONGEST = 43_200
"""Seconds from a delivery to the end of its visibility, at most: 12 hours."""
THREADS = 8
"""The most requests at once of a client of boto3. One of them is the long poll."""

_MISSING = ("NonExistentQueue", "QueueDoesNotExist")
"""The ends of the codes of a missing queue: the one of the older protocol, and its name in the new one."""


class RefusedBySqs(Exception):
    """SQS refused one entry of a batch, such as a receipt handle that has expired."""


class SqsQueue:
    """One queue. A client of boto3 is called in threads of its own, which nothing else can occupy."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = check_client(client)
        self.url: str = check_url("url", url)
        self._threads = None if hasattr(client, "__aenter__") else ThreadPoolExecutor(THREADS, "idemgate-sqs")

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request. Raises what the client raises."""
        method = functools.partial(getattr(self._client, operation), **arguments)
        if self._threads is None:
            answer: dict[str, Any] = await method()
            return answer
        return await asyncio.get_running_loop().run_in_executor(self._threads, method)

    async def receive(self, most: int, poll: int, visibility: int) -> list[SqsMessage]:
        """Wait up to `poll` seconds for messages, and hide them for `visibility` seconds."""
        answer = await self.call(
            "receive_message", QueueUrl=self.url, MaxNumberOfMessages=min(most, BATCH), WaitTimeSeconds=poll,
            VisibilityTimeout=visibility, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"],
        )  # fmt: skip
        return [SqsMessage.from_client(each) for each in answer.get("Messages", [])]

    async def hide(self, visibilities: Sequence[tuple[SqsMessage, int]]) -> None:
        """Hide up to ten messages, each for its seconds from now on; 0 returns it at once.

        Raises RefusedBySqs for the first that SQS refused, after the others.
        """
        refused = await self._send_batch(
            "change_message_visibility_batch",
            [(message, {"VisibilityTimeout": seconds}) for message, seconds in visibilities],
        )
        for error in refused.values():
            raise error

    async def delete(self, messages: Sequence[SqsMessage]) -> dict[int, RefusedBySqs]:
        """Delete up to ten messages. Return the errors of those that SQS did not delete, by their index."""
        return await self._send_batch("delete_message_batch", [(message, {}) for message in messages])

    async def bury(self, message: SqsMessage, url: str, error: BaseException | None) -> None:
        """Send a copy of a message to a dead-letter queue."""
        try:
            await self.call("send_message", **build_dead_letter(message, url, error))
        except Exception:  # noqa: BLE001 - a message of the largest size has no room for the error
            await self.call("send_message", **build_dead_letter(message, url, None))

    async def _send_batch(
        self, operation: str, messages: Sequence[tuple[SqsMessage, dict[str, int]]]
    ) -> dict[int, RefusedBySqs]:
        entries = [{"Id": str(n), "ReceiptHandle": each.receipt, **more} for n, (each, more) in enumerate(messages)]
        answer = await self.call(operation, QueueUrl=self.url, Entries=entries)
        return {
            int(failed["Id"]): RefusedBySqs(f"{failed.get('Code')}: {failed.get('Message')}")
            for failed in answer.get("Failed", [])
        }


def check_client(client: Any) -> Any:
    """Return a client of SQS. Raise InvalidArgument."""
    if not callable(getattr(client, "receive_message", None)):
        fix = 'Pass boto3.client("sqs"), or that of `async with session.create_client("sqs") as client`'
        raise InvalidArgument("client", client, "not a client of SQS", fix)
    return client


def check_url(name: str, url: object) -> str:
    """Return the URL of a queue. Raise InvalidArgument."""
    if not isinstance(url, str) or "://" not in url:
        fix = "Pass the QueueUrl that get_queue_url or create_queue returns"
        raise InvalidArgument(name, url, "not the URL of a queue", fix)
    return url


@contextmanager
def naming_missing(name: str, queue: str) -> Iterator[None]:
    """Raise InvalidArgument in the place of an answer of SQS that there is no such queue: the answer names none."""
    try:
        yield
    except Exception as error:
        answer: Any = getattr(error, "response", None)  # of a ClientError of botocore
        if isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")).endswith(_MISSING):
            fix = "Create it, or pass the URL of another one"
            raise InvalidArgument(name, queue, "SQS has no such queue", fix) from error
        raise


def is_unanswered(error: Exception) -> bool:
    """Return True if SQS did not answer, or could not work: another message would fail, too."""
    answer: Any = getattr(error, "response", None)  # of a ClientError of botocore
    try:
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
    except (LookupError, TypeError):
        return True
    return status >= 500 or status == 429
