"""The clients of the tests."""

from __future__ import annotations

from typing import Any

import boto3
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.config import Config

ACCOUNT: dict[str, Any] = {"region_name": "eu-west-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
SESSION, AIO_SESSION = boto3.Session(), get_session()  # a session reads all endpoints of AWS once
LIMITS: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 25}


def make_client(url: str) -> Any:
    """Return a client of boto3."""
    return SESSION.client("sqs", endpoint_url=url, config=Config(**LIMITS), **ACCOUNT)


def open_aio_client(url: str) -> Any:
    """Return a context manager whose value is a client of aiobotocore."""
    return AIO_SESSION.create_client("sqs", endpoint_url=url, config=AioConfig(**LIMITS), **ACCOUNT)
