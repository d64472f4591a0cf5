"""The Celery program of `test_soak.py`: `celery -A soak_app worker`.

Its order is JSON in the environment: `store` (through a proxy that fails), `reports` (the same server, without the
proxy), `namespace`, `broker`, `conf` of Celery, `options` of the task, and `seed`. Events go to the list
`reports-of-NAMESPACE`:

- ["effect", ID, TOKEN, PID]: the effect of one run
- ["ended", ID, TOKEN, PID, OUTCOME]: the outcome of the run's verdict, "not stored" if its completion may not have been
- ["waited", ID, TIME]: a delivery of a task that is in progress elsewhere, and its time in seconds
- ["dead", ID]: a task that fails for the last time
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import redis
from celery import Celery, current_task, signals
from idemgate_celery import once_tasks

from idemgate import Gate, current

FAILURES = 0.03
"""The share of runs that raise, in addition to all runs of a poison message."""
LONGEST_WORK = 0.015

order = json.loads(os.environ["SOAK"])
gate = Gate(order["store"], namespace=order["namespace"], timeout="1s")
app = Celery("soak", broker=order["broker"], task_cls=once_tasks(gate))
app.conf.update(order["conf"])
reports = redis.Redis.from_url(order["reports"])
drawn = random.Random()


@signals.worker_process_init.connect
def draw_anew(**_: Any) -> None:
    drawn.seed(f"{order['seed']} {os.getpid()}")


def report(event: str, *facts: object) -> None:
    reports.rpush(f"reports-of-{order['namespace']}", json.dumps([event, *facts]))


record_settlement = gate.record_settlement


def report_settlement(scope: str, verdict: Any, message_id: object, *, error: BaseException | None = None) -> None:
    """Report the verdict on each run before Celery settles its message."""
    body = current_task.request.args[0]
    if error is None and verdict.ran:
        not_stored = verdict.outcome == "handled" and verdict.error is not None
        report("ended", body, verdict.token, os.getpid(), "not stored" if not_stored else verdict.outcome)
    if error is None and verdict.outcome == "in_progress":
        report("waited", body, time.time())
    if error is None and verdict.outcome == "rejected":
        report("dead", body)
    record_settlement(scope, verdict, message_id, error=error)


gate.record_settlement = report_settlement  # type: ignore[method-assign]


@app.task(name="soak", ignore_result=True, once={"key": "{body}", **order["options"]})
def work(body: str) -> None:
    time.sleep(drawn.uniform(0, LONGEST_WORK))
    if body.startswith("poison") or drawn.random() < FAILURES:
        raise RuntimeError("a task that fails")
    report("effect", body, current().token, os.getpid())
    time.sleep(drawn.uniform(0, LONGEST_WORK))
