"""Topics that are sent on to SQS."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from idemgate import Delivery
from idemgate.core.text import message_of, one_line
from idemgate.errors import DownstreamUnavailable
from idemgate.topics.sending import describe_delivery, dump_payload
from idemgate_aws.message import allowed_text
from idemgate_aws.queue import SqsQueue, is_unanswered

__all__ = ["SqsSender"]

_ID = re.compile(r"[\w!\"#$%&'()*+,\-./:;<=>?@\[\\\]^`{|}~]{1,128}", re.ASCII)
"""A message group or deduplication id that SQS accepts."""


class SqsSender:
    """A handler of a topic that sends each delivery to a queue: `topic.handler(SqsSender(client, url))`.

    With `@gate.merge(..., deliver=SqsSender(client, url))` the queue gets the merged arguments.

    The body is the payload as JSON. The attribute `idemgate-id` is `delivery.id`, which stays the same at each attempt:
    a consumer with `key="{message.attributes[idemgate-id]}"` drops the copy of a send whose answer was lost. Other
    attributes are `idemgate-topic`, `-key`, `-count`, `-first-at`, `-last-at`, `-reason` and `-attempt`.

    If SQS cannot be reached, `DownstreamUnavailable` pauses the topic and counts no attempt. An error that SQS answers
    is a failed attempt. A payload that is not JSON is a dead letter of the topic at once (InvalidArgument).

    Args:
        client: see `SqsConsumer`.
        url: the queue. In a FIFO queue the deduplication id is that of the delivery.
        group: a function of a delivery that returns its message group. None: its key in a FIFO queue, so that the
            messages of a key stay in order; none in a standard queue.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(self, client: Any, url: str, *, group: Callable[[Delivery[Any]], str] | None = None) -> None:
        self._queue = SqsQueue(client, url)
        self._group = group

    async def __call__(self, delivery: Delivery[Any]) -> None:
        """Send a delivery."""
        message = self._build_message(delivery)
        try:
            await self._queue.call("send_message", **message)
        except Exception as error:
            if is_unanswered(error):
                raise DownstreamUnavailable(f"{type(error).__name__}: {one_line(message_of(error))}"[:300]) from error
            raise

    def _build_message(self, delivery: Delivery[Any]) -> dict[str, Any]:
        url = self._queue.url
        attributes = {
            name: {"DataType": "Number" if isinstance(fact, int) else "String", "StringValue": allowed_text(str(fact))}
            for name, fact in {"idemgate-id": delivery.id, **describe_delivery(delivery)}.items()
        }
        message: dict[str, Any] = {
            "QueueUrl": url, "MessageBody": dump_payload(delivery.payload), "MessageAttributes": attributes,
        }  # fmt: skip
        is_fifo = url.endswith(".fifo")
        if self._group is not None:
            message["MessageGroupId"] = self._group(delivery)
        elif is_fifo:
            message["MessageGroupId"] = _to_id(delivery.key)
        if is_fifo:
            message["MessageDeduplicationId"] = _to_id(delivery.id)
        return message


def _to_id(text: str) -> str:
    """Return the text, or a hash of one that SQS does not accept as an id."""
    return text if _ID.fullmatch(text) else blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
