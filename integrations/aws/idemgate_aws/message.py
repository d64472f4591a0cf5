"""A message of SQS, as handlers get it, and the dead letter that is made of it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from idemgate.core.text import last_line
from idemgate.core.verdict import error_of_run

__all__ = ["ERROR_ATTRIBUTE", "SqsMessage", "allowed_text", "body_of", "build_dead_letter"]

ERROR_ATTRIBUTE = "idemgate-error"
MOST_ATTRIBUTES = 10
"""The message attributes that SQS accepts."""
_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""The characters that SQS accepts neither in a body nor in an attribute."""


@dataclass(frozen=True, slots=True)
class SqsMessage:
    """A message of SQS, from `SqsConsumer` or from `lambda_batch`.

    Attributes:
        id: the id that SQS gave it. It stays through redeliveries. A producer that sends again gets another one.
        body: its text.
        group: its message group, or None.
        deduplication_id: the deduplication id of a message in a FIFO queue, or None. With content-based deduplication
            it is a hash of the body, so that two orders with one body share it.
        receives: how many times SQS has delivered it, this delivery included.
        receipt: its receipt handle, which deletes it.
        queue_arn: the ARN of its queue. Only Lambda knows it.
        message_attributes: its attributes, in the form of `send_message`.
    """

    id: str
    body: str
    group: str | None = None
    deduplication_id: str | None = None
    receives: int = 0
    receipt: str = field(default="", repr=False)
    queue_arn: str = field(default="", repr=False)
    message_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def attributes(self) -> dict[str, str | bytes]:
        """Return the values of its message attributes by name. A number is text."""
        return {
            name: each["StringValue"] if "StringValue" in each else each["BinaryValue"]
            for name, each in self.message_attributes.items()
        }

    @property
    def json(self) -> Any:
        """Decode its body, each time. Raises ValueError."""
        return json.loads(self.body)

    @classmethod
    def from_client(cls, received: Mapping[str, Any]) -> SqsMessage:
        """Build it from what a client received."""
        attributes = {
            name: {kind: each[kind] for kind in ("DataType", "StringValue", "BinaryValue") if kind in each}
            for name, each in received.get("MessageAttributes", {}).items()
        }
        return cls(
            received["MessageId"], received["Body"], **_read_system(received.get("Attributes", {})),
            receipt=received["ReceiptHandle"], message_attributes=attributes,
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SqsMessage:
        """Build it from a record of an event of Lambda."""
        attributes = {
            name: {"DataType": each["dataType"]} | (
                {"StringValue": each["stringValue"]} if each.get("stringValue") is not None
                else {"BinaryValue": base64.b64decode(each["binaryValue"])}
            )
            for name, each in record.get("messageAttributes", {}).items()
        }  # fmt: skip
        return cls(
            record["messageId"], record["body"], **_read_system(record.get("attributes", {})),
            receipt=record["receiptHandle"], queue_arn=record["eventSourceARN"], message_attributes=attributes,
        )  # fmt: skip


def _read_system(attributes: Mapping[str, str]) -> dict[str, Any]:
    return {
        "group": attributes.get("MessageGroupId"),
        "deduplication_id": attributes.get("MessageDeduplicationId"),
        "receives": int(attributes.get("ApproximateReceiveCount", 0)),
    }


def body_of(message: SqsMessage) -> bytes:
    """Return the body as the fingerprint of a message."""
    return message.body.encode()


def build_dead_letter(message: SqsMessage, url: str, error: BaseException | None) -> dict[str, Any]:
    """Return the arguments of `send_message` for a copy of a message, with the error as an attribute.

    Args:
        message: the message.
        url: the dead-letter queue.
        error: the error of the message. None for a copy without the attribute.
    """
    attributes: dict[str, Mapping[str, Any]] = dict(message.message_attributes)
    if error is not None and len(attributes.keys() | {ERROR_ATTRIBUTE}) <= MOST_ATTRIBUTES:
        text = allowed_text(last_line(error_of_run(error)))
        attributes[ERROR_ATTRIBUTE] = {"DataType": "String", "StringValue": text}
    sent: dict[str, Any] = {"QueueUrl": url, "MessageBody": message.body, "MessageAttributes": attributes}
    if url.endswith(".fifo"):
        sent["MessageGroupId"] = message.group or message.id
        sent["MessageDeduplicationId"] = message.deduplication_id or message.id
    return sent


def allowed_text(text: str) -> str:
    """Return text as SQS accepts it in an attribute: other characters are escaped, such as \\x00, and none is empty."""
    return _REFUSED.sub(lambda found: found[0].encode("unicode_escape").decode(), text) or " "
