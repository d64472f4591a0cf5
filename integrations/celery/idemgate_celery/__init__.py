"""Celery tasks that run once per key."""

from __future__ import annotations

from idemgate_celery.once import OnceTask, TaskOnce, once_tasks

__all__ = ["OnceTask", "TaskOnce", "once_tasks"]
