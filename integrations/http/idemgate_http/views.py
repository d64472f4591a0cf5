"""The guard around a function that returns a response object: views of Django and Flask, and Django's middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from idemgate import Verdict
from idemgate_http.core import Admission, HttpGuard, Released
from idemgate_http.outliving import Outliving
from idemgate_http.response import Response

__all__ = ["Adapter", "pack_form", "run_view", "run_view_async"]

R = TypeVar("R")


class Adapter(Protocol[R]):
    """The conversion between the responses of a framework and values."""

    def read(self, response: R) -> Response | tuple[int, str]:
        """Return the response as a value, or its status and why it cannot be kept."""
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
        found = self._adapter.read(response)
        if isinstance(found, Response):
            return self._core.pack(self._admission.request, found)
        return self._core.pack_not_kept(*found)

    def finish(self, verdict: Verdict[Any]) -> R:
        """Return the view's response or that of its record, or raise the view's exception."""
        if (answer := self._core.answer(verdict)) is not None:
            return self._adapter.build(answer)
        if self._error is not None:
            raise self._error
        return self._response[0]


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
