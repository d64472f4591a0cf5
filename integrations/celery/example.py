"""Copies of a task, on an embedded server and with a worker in this process: `python example.py`."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker
from idemgate_celery import once_tasks

from idemgate import Gate
from idemgate.testing import temporary_server


def main(store: str) -> None:
    gate = Gate(store, namespace="celery-example")
    broker = store.replace("unix://", "redis+socket://") + "?virtual_host=1"
    app = Celery("example", broker=broker, backend="cache+memory://", task_cls=once_tasks(gate, backoff="200ms"))
    app.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

    @app.task(name="charge", once="{order[id]}")
    def charge(order: dict[str, Any]) -> str:
        print("charging", order["id"])
        return f"receipt of {order['id']}"

    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        first, copy = charge.delay({"id": "o1"}), charge.delay({"id": "o1"})
        print("first:", first.get(30))
        print("copy:", copy.get(30))
        once = [charge.delay_once({"id": "o2"}) for _ in range(3)]
        once[-1].get(30)
        print("enqueued", len({result.id for result in once}), "of", len(once))
        gate.claim("o3", scope="charge", lease="1s")  # a worker that died
        began = time.monotonic()
        receipt = charge.delay({"id": "o3"}).get(30)
        print("o3:", receipt, "after a wait of 1 s" if time.monotonic() > began + 0.9 else "at once")
    print({name: n for name, n in gate.counters.snapshot().items() if name.startswith("consumer.")})
    gate.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    with temporary_server() as url:
        main(url)
