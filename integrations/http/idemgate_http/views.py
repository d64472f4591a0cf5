"""The guard around a function that returns a response object: views of Django and Flask, and Django's middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from idemgate import Verdict, current
from idemgate.guard.call import end_kept, start_lease
from idemgate.guard.heartbeat import Heartbeat, NoHeartbeat
from idemgate.guard.request import Grant
from idemgate_http.core import Admission, HttpGuard, Released, Unrendered
from idemgate_http.outliving import Outliving
from idemgate_http.response import Response

__all__ = ["Adapter", "Late", "pack_form", "run_view", "run_view_async"]

R = TypeVar("R")


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

    def defer(self, response: R, late: Late[R]) -> None:
        """Let the response call `late` when it is rendered."""
        ...

    def build(self, response: Response) -> R:
        """Return the framework's response."""
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
        if self._kept is not None:
            self._adapter.defer(self._response[0], Late(self._core, self._kept, self.read))
            return self._response[0]
        if (answer := self._core.answer(verdict)) is not None:
            return self._adapter.build(answer)
        if self._error is not None:
            raise self._error
        return self._response[0]


class Late(Generic[R]):
    """The end of a claim whose view has returned, and whose response is rendered later. It blocks.

    The lease is renewed only in a `with` block around the rendering. So a response that is never rendered blocks its
    key for no longer than the lease.
    """

    def __init__(self, core: HttpGuard, grant: Grant, read: Callable[[R], list[Any]]) -> None:
        self._core = core
        self._guard = core.guard._guard
        self._grant = grant
        self._read = read

    def renew(self) -> Heartbeat | NoHeartbeat:
        """Renew the lease in a `with` block."""
        return start_lease(self._guard.context, self._grant, with_current=False)

    def record(self, response: R) -> None:
        """Store a response that is rendered, or release the key if its status is not kept."""
        try:
            result = self._read(response)
        except Released as released:
            self.fail(released)
        else:
            self._core.answer(end_kept(self._guard, self._grant, result))

    def fail(self, error: BaseException) -> None:
        """Release the key, because the response could not be rendered."""
        self._core.answer(end_kept(self._guard, self._grant, None, error))


def pack_form(form: Any, files: Any) -> bytes:
    """Return a form that was parsed before the guard as bytes, in the place of its body.

    Args:
        form: the fields, as a multi-value dict of Django or Werkzeug.
        files: the uploaded files, as such a dict. They are rewound.
    """
    digests: list[tuple[str, str, str]] = []
    for name, uploads in files.lists():
        for upload in uploads:
            digest = blake2b(upload.read()).hexdigest()
            upload.seek(0)
            digests.append((name, getattr(upload, "filename", upload.name), digest))
    return json.dumps([list(form.lists()), digests]).encode()


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
        else:
            task.cancel()
        raise
