"""The guard around a function that returns a response object: views of Django and Flask, and Django's middleware."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from idemgate import Verdict, current
from idemgate.core.calls import Batch
from idemgate.guard.call import build_end, encode_ending, end_kept, record_end, start_lease
from idemgate.guard.request import RELEASE, Ending, Grant, build_ending
from idemgate.store.heartbeat import LeaseRenewal
from idemgate_http.core import Admission, HttpGuard, Released, Unrendered, log_facts
from idemgate_http.outliving import Outliving
from idemgate_http.response import Response

__all__ = ["Adapter", "Late", "pack_form", "run_view", "run_view_async"]

R = TypeVar("R")
log: logging.Logger = logging.getLogger("idemgate.http")


class Adapter(Protocol[R]):
    """The conversion between the responses of a framework and values."""

    def read(self, response: R) -> Response | tuple[int, str]:
        """Return the response as a value, or its status and why it cannot be kept."""
        ...

    def get_status(self, response: R) -> int:
        """Return the status of a response whose body cannot be read."""
        ...

    def is_late(self, response: R) -> bool:
        """Return True if the framework renders the response after the view has returned."""
        ...

    def defer(self, request: Any, response: R, late: Late[R]) -> None:
        """Let the response call `late` when it is rendered, and the request when it ends without that."""
        ...

    def build(self, request: Any, response: Response) -> R:
        """Return the framework's response to a request."""
        ...


class _ViewRun(Generic[R]):
    """One call of a view. `started` says whether it was called."""

    def __init__(self, core: HttpGuard, admission: Admission, adapter: Adapter[R]) -> None:
        self._core = core
        self._admission = admission
        self._adapter = adapter
        self._response: list[R] = []
        self._kept: Grant | None = None
        self._error: Exception | None = None
        self.started = False

    def run(self, view: Callable[[], R]) -> list[Any]:
        """Call the view and return what the record stores."""
        self.started = True
        try:
            response = view()
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = error
            raise Released from None
        return self._record(response)

    async def run_async(self, view: Callable[[], Awaitable[R]]) -> list[Any]:
        """Call an async view and return what the record stores."""
        self.started = True
        try:
            response = await view()
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = error
            raise Released from None
        return self._record(response)

    def _record(self, response: R) -> list[Any]:
        self._response.append(response)
        if self._adapter.is_late(response) and (execution := current()).token:  # without the store there is no claim
            self._kept = execution._grant
            raise Unrendered
        return self.read(response)

    def read(self, response: R) -> list[Any]:
        """Return what the record of a response stores. Raise Released if its status is not kept."""
        try:
            found = self._adapter.read(response)
        except Exception as error:  # noqa: BLE001 - the operation is done, whatever reading its response raises
            status = self._adapter.get_status(response)
            return self._core.pack_unreadable(self._admission.request, status, error)
        if isinstance(found, Response):
            return self._core.pack(self._admission.request, found)
        return self._core.pack_not_kept(*found)

    def finish(self, verdict: Verdict[Any]) -> R:
        """Return the view's response or that of its record, or raise the view's exception."""
        if (late := self._get_late()) is not None:
            self._adapter.defer(self._admission.request.raw, self._response[0], late)
            return self._response[0]
        if (answer := self._core.answer(verdict)) is not None:
            return self._adapter.build(self._admission.request.raw, answer)
        if self._error is not None:
            raise self._error
        return self._response[0]

    def finish_alone(self, task: asyncio.Task[Verdict[Any]]) -> None:
        """End the claim of a view whose request has gone: nobody renders its response."""
        if not task.cancelled() and (late := self._get_late()) is not None:
            late.discard()

    def _get_late(self) -> Late[R] | None:
        if self._kept is None:
            return None
        return Late(self._core, self._admission, self._kept, self._response[0], self.read)


class Late(LeaseRenewal, Generic[R]):
    """The end of a claim whose view has returned, and whose response is rendered later.

    The framework may never render it: a middleware or an outer view sends another response, or the client has gone.
    The view did its work, so the key is then done without a response. The heartbeat thread stores that, at once after
    `discard`, or after half of the lease.
    """

    __slots__ = ("_admission", "_core", "_ending", "_grant", "_guard", "_is_free", "_is_held", "_read",
                 "_response")  # fmt: skip

    def __init__(
        self, core: HttpGuard, admission: Admission, grant: Grant, response: R, read: Callable[[R], list[Any]]
    ) -> None:
        super().__init__(grant.request.options.lease / 1000)
        self.due: float = self.last + self.lease / 2
        self._core = core
        self._guard = core.guard._guard
        self._admission = admission
        self._grant = grant
        self._response = response
        self._read = read
        self._is_free = [True]  # empty as soon as a thread ends the claim; `pop` is atomic
        self._is_held = False
        self._ending: Ending | None = None
        core.unrendered.add(self)  # the heartbeat thread does not keep it alive
        self._guard.context.heartbeat.add(self)

    def _take(self) -> bool:
        """Return True for the first caller, which ends the claim."""
        try:
            return self._is_free.pop()
        except IndexError:
            return False

    def _forget(self) -> None:
        self._guard.context.heartbeat.remove(self)
        self._core.unrendered.discard(self)

    # The response is rendered

    @contextmanager
    def hold(self) -> Generator[None]:
        """Renew the lease in a `with` block around the rendering, unless the key is done without a response."""
        if not self._take():
            yield
            return
        self._forget()
        self._is_held = True
        with start_lease(self._guard.context, self._grant, with_current=False):
            yield

    def record(self, response: R) -> None:
        """Store a response that is rendered, or release the key if its status is not kept. It blocks."""
        try:
            result = self._read(response) if self._is_held else None
        except Released as released:
            self.fail(released)
        else:
            self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """Release the key, because the response could not be rendered. It blocks."""
        self._end(None, error)

    def _end(self, result: list[Any] | None, error: BaseException | None) -> None:
        if self._is_held:
            self._is_held = False
            self._core.answer(end_kept(self._guard, self._grant, result, error))

    # It is not rendered

    def discard(self) -> None:
        """Let the heartbeat thread end the claim, unless the response is rendered. It does not block."""
        if self._is_free:
            self._guard.context.heartbeat.hasten(self)

    def renew(self) -> Sequence[Batch[None]]:
        """Build the end of the claim; called by the heartbeat thread, again if the store does not answer."""
        if self._ending is None:
            if not self._take():
                return ()
            self._ending = self._decide()
        return (Batch([build_end(self._grant, self._ending)], self._record_end),)

    def _decide(self) -> Ending:
        """Return the end of the claim: done without a response, or free if its status is not kept."""
        core, facts = self._core, log_facts(self._admission)
        core.counters.add("http.unrendered")
        log.warning("http.unrendered method=%s path=%s record=%s", *facts.values(), extra=facts)
        try:
            result = self._read(self._response)
        except Released:
            core.counters.add("http.released")
            return build_ending(RELEASE)
        return encode_ending(self._guard.options, result)

    def _record_end(self, answers: list[bool]) -> None:
        self._forget()
        assert self._ending is not None
        record_end(self._guard, self._grant, self._ending, answers[0])
        if not answers[0]:
            self._core.counters.add("http.lost")

    def overdue(self) -> None:
        """Give up: the store does not answer, or the gate is closed. A retry may run when the lease has ended."""
        self._forget()


def pack_form(form: Any, files: Any) -> bytes:
    """Return a form that was parsed before the guard as bytes, in the place of its body.

    Args:
        form: the fields, as a multi-value dict of Django or Werkzeug.
        files: the uploaded files, as such a dict. They are rewound.
    """
    digests: list[tuple[object, ...]] = []
    for name, uploads in files.lists():
        for upload in uploads:
            digest = blake2b(upload.read()).hexdigest()
            upload.seek(0)
            extra = getattr(upload, "content_type_extra", None)  # Django has the parameters of the type here
            digests.append((name, getattr(upload, "filename", upload.name), upload.content_type, extra, digest))
    return json.dumps([list(form.lists()), digests], default=str).encode()


def run_view(core: HttpGuard, admission: Admission, adapter: Adapter[R], view: Callable[[], R]) -> R:
    """Call a view once for the key of a request, or answer from its record."""
    run = _ViewRun(core, admission, adapter)
    return run.finish(core.guard.run(admission.key, run.run, view, fingerprint=admission.fingerprint))


async def run_view_async(
    core: HttpGuard, admission: Admission, adapter: Adapter[R], view: Callable[[], Awaitable[R]], outliving: Outliving
) -> R:
    """Call an async view once for the key of a request, or answer from its record.

    With `shield` a cancellation of the request does not cancel the view, once it has started.
    """
    run = _ViewRun(core, admission, adapter)
    guarded = core.guard.aio.run(admission.key, run.run_async, view, fingerprint=admission.fingerprint)
    if not core.options.shield:
        return run.finish(await guarded)
    task = asyncio.create_task(guarded)
    try:
        return run.finish(await asyncio.shield(task))
    except asyncio.CancelledError:
        if run.started:
            outliving.add(admission, task)
            task.add_done_callback(run.finish_alone)
        else:
            task.cancel()
        raise
