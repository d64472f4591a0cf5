"""idemgate and AWS: consumers of SQS and batches of Lambda that run each message once, and topics sent on to SQS."""

from __future__ import annotations

from idemgate_aws.batches import lambda_batch
from idemgate_aws.consumer import SqsConsumer
from idemgate_aws.message import SqsMessage
from idemgate_aws.sender import SqsSender

__all__ = ["SqsConsumer", "SqsMessage", "SqsSender", "lambda_batch"]

__version__ = "0.1.0"
