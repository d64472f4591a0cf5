"""HTTP answers of a worker, given by other threads: /live and /ready for an orchestrator, /metrics for Prometheus."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from idemgate.cli.listener import Answer, answer_problems, listen
from idemgate.core import keys
from idemgate.core.clock import monotonic
from idemgate.errors import NotConfigured, StoreError
from idemgate.gate import Gate
from idemgate.store.sync import SyncLink

__all__ = ["Probes"]

STALLED = 30.0
"""Seconds after which an event loop that did not run, or a worker without a reply to a poll, is reported."""
STORE_WITHIN = 1.0
"""Seconds in which the store must answer."""


class Probes:
    """The probes of one gate: they answer while its lifespan runs, also while the worker starts and stops.

    Args:
        gate: the gate that will run.
        address: `port` or `host:port`. Without a host only this machine reaches it.

    Raises:
        InvalidArgument: the address is invalid, or another program has the port.
    """

    def __init__(self, gate: Gate, address: str) -> None:
        self._gate = gate
        self._link: SyncLink | None = None
        self._lock = threading.Lock()  # one check of the store at a time
        self._ran_at = monotonic()
        self._server = listen(
            "--probe", address,
            {
                "/live": lambda: answer_problems(self.live()), "/ready": lambda: answer_problems(self.ready()),
                "/metrics": _metrics_of(gate),
            },
        )  # fmt: skip

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    async def lifespan(self) -> AsyncIterator[None]:
        """Answer until it is left."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="idemgate-probe")
        thread.start()
        ticks = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticks.cancel()
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            if self._link is not None:
                self._link.close()

    async def _tick(self) -> None:
        while True:
            self._ran_at = monotonic()
            await asyncio.sleep(1)

    # -- answers, in threads of the server ----------------------------------------------------------------------------

    def live(self) -> list[str]:
        """Return why the program should be restarted."""
        stalled = monotonic() - self._ran_at
        return [f"the event loop has not run for {stalled:.0f} s"] if stalled > STALLED else []

    def ready(self) -> list[str]:
        """Return why it does no work now."""
        runners = self._gate.context.runners.now()
        problems = self.live() if runners else ["not started"]
        for runner in runners:
            silent, (busy, _) = monotonic() - runner.replied_at(), runner.places()
            if not busy and silent > STALLED:
                problems.append(f"no reply to a poll for {silent:.0f} s")
        return problems if self._store_answers() else [*problems, "the store does not answer"]

    def _store_answers(self) -> bool:
        context = self._gate.context
        if not self._lock.acquire(timeout=STORE_WITHIN):
            return False  # it keeps another probe waiting
        try:
            if self._link is None:
                self._link = SyncLink(context.endpoint, STORE_WITHIN)
            self._link.command("PING", keys.topics(context.namespace))
        except StoreError:
            return False
        finally:
            self._lock.release()
        return True


def _metrics_of(gate: Gate) -> Callable[[], Answer]:
    """Return the answer of /metrics. The import is made before the worker starts, because it takes more than 10 ms."""
    try:
        from idemgate.metrics import CONTENT_TYPE, render_process
    except NotConfigured as error:
        answer = answer_problems([str(error)], HTTPStatus.NOT_IMPLEMENTED)
        return lambda: answer
    return lambda: Answer(HTTPStatus.OK, CONTENT_TYPE, render_process(gate))
