"""Each integration refuses what is no gate, when it gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from idemgate_aws import SqsConsumer, lambda_batch
from idemgate_celery import debounced_tasks, deliver_in_workers, once_tasks
from idemgate_faststream import Once
from idemgate_http import IdempotencyKey
from idemgate_kafka import KafkaConsumer
from idemgate_otel import instrument
from idemgate_rabbitmq import guarded
from idemgate_sql.psycopg import AsyncInbox
from idemgate_sql.sqlite import Inbox
from idemgate_webhook import Webhooks
from idemgate_zookeeper import ZooKeeperMembership

from idemgate import Gate, InvalidArgument
from idemgate.ui import app
from tests.for_each import for_each


def take(message: Any) -> None: ...


KEY = "{message.id}"
NEEDS_GATE: dict[str, Callable[[Any], object]] = {
    "sqs": lambda gate: SqsConsumer(gate, None, "https://q", take, key=KEY),
    "lambda": lambda gate: lambda_batch(gate, take, key=KEY),
    "celery": once_tasks,
    "debounce": debounced_tasks,
    "deliver": deliver_in_workers,
    "faststream": lambda gate: Once(gate, key=KEY),
    "http": lambda gate: IdempotencyKey(None, gate=gate, single_tenant=True),  # type: ignore[arg-type]
    "kafka": lambda gate: KafkaConsumer(gate, {}, "orders", take, key=KEY, dead_topic=None),
    "rabbitmq": guarded,
    "relay": lambda gate: Inbox("x.db").relay(gate),
    "row": lambda gate: Inbox("x.db").delete_row(gate, "k", scope="s"),
    "row (async)": lambda gate: asyncio.run(AsyncInbox("postgresql://x").delete_row(gate, "k", scope="s")),
    "webhook": lambda gate: Webhooks(gate, secret="whsec_" + "a" * 32),
    "page": lambda gate: app(gate, access=take),  # type: ignore[arg-type]
}
TAKES_BOTH: dict[str, Callable[[Any], object]] = {
    "otel": instrument,
    "zookeeper": lambda gate: ZooKeeperMembership(gate, "localhost:2181"),
}


@for_each(("build", "wrong", "said"), [
    pytest.param(build, wrong, said, id=f"{name} {said}")
    for name, build in (NEEDS_GATE | TAKES_BOTH).items()
    for wrong, said in [
        ("redis://user:secret@store", r"gate=<class 'str'>: not a Gate. Pass Gate\(\"redis://...\"\)"),
        (Gate, r"gate=<class 'idemgate.gate.Gate'>: not a Gate. Pass Gate\(\"redis://...\"\)"),
        (Gate("redis://store").aio, "not a Gate. Pass the gate itself"),
    ]
    if name in NEEDS_GATE or said[-1] == ")"
])  # fmt: skip
def test_what_is_no_gate_is_refused(build: Callable[[Any], object], wrong: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        build(wrong)


@for_each("build", TAKES_BOTH.values())
def test_the_async_form_is_taken_where_a_context_is_enough(build: Callable[[Any], object]) -> None:
    build(Gate("redis://store").aio)
