"""Celery tasks that run once per key, and tasks whose calls merge."""

from __future__ import annotations

from idemgate_celery.debounce import Debounce, DebouncedTask, debounced_tasks, deliver_in_workers
from idemgate_celery.once import OnceTask, TaskOnce, once_tasks

__all__ = [
    "Debounce", "DebouncedTask", "OnceTask", "TaskOnce", "debounced_tasks", "deliver_in_workers", "once_tasks",
]  # fmt: skip
