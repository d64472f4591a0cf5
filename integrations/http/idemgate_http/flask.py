"""Flask: `@idempotent(gate, caller=...)` for one view. For a whole app wrap `app.wsgi_app` in `IdempotencyKeyWSGI`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, Unpack

import flask
from werkzeug.exceptions import ClientDisconnected, HTTPException, RequestEntityTooLarge

from idemgate import Gate
from idemgate_http.core import MARK, STREAMED, Admission, HttpGuard, Selected
from idemgate_http.options import HttpOptions
from idemgate_http.response import Response
from idemgate_http.views import Late, pack_form, run_view
from idemgate_http.wsgi import read_environ

__all__ = ["idempotent"]

P = ParamSpec("P")


def idempotent(
    gate: Gate, **options: Unpack[HttpOptions]
) -> Callable[[Callable[P, Any]], Callable[P, flask.typing.ResponseReturnValue]]:
    """Guard one view, below its `@app.post(...)`. It runs after `before_request`, so after the authentication.

    Above `@app.post(...)` it guards nothing: Flask has registered the view itself, and leaves no trace at it.
    What `after_request` changes in the response is not part of what is stored. If the view raises an exception that
    Flask turns into a response, by `abort(409)` or an error handler, this response counts as the view's. Async views
    are supported as Flask does.

    Args:
        gate: the gate whose store keeps the responses.
        **options: see `HttpOptions`.

    Raises:
        InvalidArgument: an option is invalid, or neither `caller` nor `single_tenant` is given.
    """
    core = HttpGuard(gate, options, HttpOptions)

    def decorate(view: Callable[P, Any]) -> Callable[P, flask.typing.ResponseReturnValue]:
        @functools.wraps(view)
        def call_guarded(*args: P.args, **kwargs: P.kwargs) -> flask.typing.ResponseReturnValue:
            def call() -> flask.Response:
                app = flask.current_app
                try:
                    value = app.ensure_sync(view)(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - raised again, if no error handler of the app returns a response
                    value = app.handle_user_exception(error)
                if isinstance(value, HTTPException):
                    value = value.get_response(flask.request.environ)
                return flask.make_response(value)

            return _run(core, call)

        return call_guarded

    return decorate


def _run(core: HttpGuard, call: Callable[[], flask.Response]) -> flask.Response:
    """Return the response to the current request: refused, replayed, or that of the view."""
    request = flask.request
    if core.passes(request.method, request.environ.get(MARK)):
        return call()
    selected = core.select(read_environ(request.environ))
    if selected is None:
        return call()
    try:
        admission = selected if isinstance(selected, Response) else _read_body(core, request, selected)
    except ClientDisconnected:  # the body is shorter than its Content-Length
        admission = core.refuse("body-incomplete")
    except RequestEntityTooLarge:
        admission = core.refuse("body-too-large")
    if isinstance(admission, Response):
        return _ADAPTER.build(request, admission)
    request.environ[MARK] = core.mark
    if admission is None:
        return call()
    return run_view(core, admission, _ADAPTER, call)


def _read_body(core: HttpGuard, request: flask.Request, selected: Selected) -> Admission | Response | None:
    """Read the body, or the form if something before the view has parsed it: then Flask has no body any more.

    Raises:
        RequestEntityTooLarge: the body has more than `max_body_bytes`. Flask 3.0 reads a chunked body of any length.
        RuntimeError: something before the view has read the stream.
    """
    most = core.options.max_body_bytes
    with suppress(AttributeError):  # Flask 3.0 has one limit for all requests
        limit = request.max_content_length
        request.max_content_length = most if limit is None else min(most, limit)
    is_opened = "stream" in vars(request) and getattr(request, "_cached_data", None) is None
    is_parsed = "form" in vars(request)
    body = request.get_data()
    if not body and (request.form or request.files or (is_parsed and _is_empty_form(request))):
        return core.admit(selected, pack_form(request.form, request.files), is_form=True)
    is_gone = is_opened and not is_parsed and "transfer-encoding" in request.headers  # without a length
    if not body and (request.content_length or is_gone):
        raise RuntimeError(
            f"the body of {request.method} {request.path!r} was read before the guard. Read it with request.get_data()"
        )
    return core.admit(selected, body)


def _is_empty_form(request: flask.Request) -> bool:
    """Return True for a multipart body that is too short for a part. A part has a boundary before and behind it."""
    boundary, length = request.mimetype_params.get("boundary", ""), request.content_length or 0
    return boundary != "" and len(f"--{boundary}--") <= length < 2 * len(f"--{boundary}\r\n")


class _FlaskAdapter:
    """Responses of Flask as values."""

    def read(self, response: flask.Response) -> Response | tuple[int, str]:
        """Return a response as a value. One that streams, or that the server sends from a file, cannot be kept."""
        if response.is_streamed or response.direct_passthrough:
            return response.status_code, STREAMED
        return Response(response.status_code, tuple(response.headers.items()), response.get_data())

    def get_status(self, response: flask.Response) -> int:
        """Return the status of a response."""
        return response.status_code

    def is_late(self, response: flask.Response) -> bool:  # noqa: ARG002
        """Return False: Flask renders templates in the view."""
        return False

    def defer(self, request: Any, response: flask.Response, late: Late[flask.Response]) -> None:  # noqa: ARG002
        """Raise AssertionError: no response of Flask is rendered later."""
        raise AssertionError

    def build(self, request: Any, response: Response) -> flask.Response:  # noqa: ARG002
        """Return a value as a response."""
        return flask.Response(response.body, response.status, list(response.headers))


_ADAPTER = _FlaskAdapter()
