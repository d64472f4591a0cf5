"""The visibility timeout of a Redis broker: how long a worker may hold a task before another one gets it."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from celery import Celery

__all__ = ["Visibility"]

_DEFAULT = 3600
"""The visibility timeout of kombu, in seconds."""


class Visibility:
    """The tasks that the workers of an app hold, in the broker's own index of them.

    kombu stores there when each task was taken. What is older than the visibility timeout is delivered again, also
    while it runs, or waits in a worker for its `eta`.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._process = 0
        self._channel: Any = None

    @functools.cached_property
    def seconds(self) -> float | None:
        """The visibility timeout. None if the broker is not Redis. It connects to nothing."""
        connection: Any = self._app.connection_for_read()
        if connection.transport.driver_type != "redis":
            return None
        return float(connection.transport_options.get("visibility_timeout", _DEFAULT))

    def keep(self, tag: str, seconds: float) -> None:
        """Hide a task that a worker holds, for this time from now on, or the visibility timeout if it is longer."""
        channel = self._open()
        _take_at(channel, tag, time.time() + max(0.0, seconds - channel.visibility_timeout))

    def hold_until(self, message: Any, eta: float) -> None:
        """Let the visibility timeout of a task that a worker has received count from its `eta`."""
        if self.seconds is not None and eta > time.time():
            _take_at(message.channel, message.delivery_tag, eta)

    def _open(self) -> Any:
        """Return a channel of this process: a worker's child must not use the connection of its parent."""
        with self._lock:
            if self._process != os.getpid():
                connection: Any = self._app.connection_for_read()
                self._channel, self._process = connection.channel(), os.getpid()
            return self._channel


def _take_at(channel: Any, tag: str, moment: float) -> None:
    """Store that a task was taken at a moment, if the broker still has it in its index."""
    with channel.conn_or_acquire() as client:
        client.zadd(channel.unacked_index_key, {tag: moment}, xx=True)
