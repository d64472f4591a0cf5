"""Django: `IdempotencyKeyMiddleware` for MIDDLEWARE, and `@idempotent` for a view. Both are sync and async.

The setting IDEMGATE_HTTP is a dict of the options in capitals. GATE is a gate or its dotted path. Without it the
default gate is used (`idemgate.configure`, IDEMGATE_URL). Functions may be dotted paths:

    IDEMGATE_HTTP = {"GATE": "shop.gates.gate", "CALLER": "shop.auth.account_of", "RETENTION": "24h"}
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from inspect import iscoroutinefunction, ismethod
from types import FunctionType
from typing import Any, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from asgiref.sync import iscoroutinefunction as is_marked_async
from asgiref.sync import markcoroutinefunction, sync_to_async
from django import conf
from django.core.exceptions import RequestDataTooBig
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, RawPostDataException
from django.template.response import SimpleTemplateResponse
from django.utils.datastructures import ImmutableList
from django.utils.module_loading import import_string

from idemgate import Gate, InvalidArgument, default_gate
from idemgate_http.core import MARK, STREAMED, UNRENDERED, Admission, HttpGuard
from idemgate_http.options import ShieldOptions
from idemgate_http.outliving import Outliving
from idemgate_http.request import Headers, Request
from idemgate_http.response import Response
from idemgate_http.views import Late, pack_form, run_view, run_view_async

__all__ = ["IdempotencyKeyMiddleware", "idempotent"]

V = TypeVar("V", bound=Callable[..., Any])
GetResponse = Callable[[HttpRequest], Any]
_SETTING = "IDEMGATE_HTTP"
_CALLABLES = ("caller", "source", "applies_to", "required", "fingerprint", "redact")


class IdempotencyKeyMiddleware:
    """Answer the retries of a request from its first response.

    Put it behind the authentication in MIDDLEWARE, and behind GZipMiddleware. A transaction of ATOMIC_REQUESTS commits
    before the response is stored. A request costs two round trips to the store, a retry one.

    Raises:
        InvalidArgument: an option in IDEMGATE_HTTP is invalid, or neither CALLER nor SINGLE_TENANT is given.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self._get_response = get_response
        self._guard = _DjangoGuard({})
        if is_marked_async(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Handle one request. The result is awaitable if the rest of the chain is."""
        run = self._guard.run_async if is_marked_async(self) else self._guard.run
        return run(request, functools.partial(self._get_response, request))


@overload
def idempotent(view: V, /) -> V: ...
@overload
def idempotent(*, gate: Gate | None = None, **options: Unpack[ShieldOptions]) -> Callable[[V], V]: ...
def idempotent(view: Any = None, /, *, gate: Gate | None = None, **options: Unpack[ShieldOptions]) -> Any:
    """Guard one view: `@idempotent`, or `@idempotent(retention="7d")` to replace options of IDEMGATE_HTTP.

    With ATOMIC_REQUESTS the transaction of a sync view begins and commits inside the guard, so its effects are
    committed before its response is stored. A response that is rendered later, of a template or of Django REST
    framework, is stored when it is rendered; until then its key is claimed. If another one is sent in its place, the
    key is done without a response. Middleware that changes the response later is not part of what is stored. Behind
    `IdempotencyKeyMiddleware` the decorator does nothing more.

    Raises:
        InvalidArgument: an option is invalid, neither `caller` nor `single_tenant` is given, or the view is a class or
            a method of one. Write `@method_decorator(idempotent)` on a method.
    """
    if view is None:
        given = {**options, **({} if gate is None else {"gate": gate})}
        return functools.partial(_decorate, given=given, guards=WeakKeyDictionary())
    return _decorate(view, {}, _GUARDS)


def _refuse_method(view: object) -> None:
    """Raise InvalidArgument for a class, and for a function of a class, which gets the request after `self`."""
    if isinstance(view, type):
        fix = "Write idempotent(View.as_view()), or @method_decorator(idempotent, name='dispatch') above the class"
        raise InvalidArgument("view", view, "a class, not a view", fix)
    fix = "Write @method_decorator(idempotent), or idempotent(View.as_view()) for all methods"
    if isinstance(view, classmethod | staticmethod | functools.partialmethod):
        inner = getattr(view, "__func__", getattr(view, "func", view))
        if isinstance(view, staticmethod):
            fix = "Write @staticmethod above @idempotent"
        raise InvalidArgument(
            "view", getattr(inner, "__qualname__", inner), f"a {type(view).__name__}, not a view", fix
        )
    inner = list(_unwrap(view))[-1]
    if isinstance(inner, FunctionType) and _is_method(inner):
        raise InvalidArgument("view", inner.__qualname__, "a method of a class, not a view", fix)


def _is_method(func: FunctionType) -> bool:
    """Return whether a function takes an object before the request, by its first parameter and where it was defined.

    A function in the body of a class whose first parameter is a request will be a staticmethod.
    """
    first = func.__code__.co_varnames[: func.__code__.co_argcount][:1]
    in_class = func.__qualname__.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")
    return first in (("self",), ("cls",)) or (in_class and (not first or "req" not in first[0].lower()))


def _check_request(view: Any, request: object) -> None:
    """Raise InvalidArgument for a method that gets its object first. Its decorator hid that from `_refuse_method`."""
    if not isinstance(request, HttpRequest) and not hasattr(request, "META"):  # Django REST framework has its own class
        fix = "On a method write @method_decorator(idempotent)"
        problem = f"it was called with a {type(request).__name__} in the place of the request"
        raise InvalidArgument("view", getattr(view, "__qualname__", view), problem, fix)


def _unwrap(view: Any) -> Iterator[Any]:
    """Yield a view and the functions that it wraps. What `as_view` returns wraps a method that it calls itself."""
    yield view
    while isinstance(view, FunctionType) and hasattr(view, "__wrapped__") and not _AS_VIEW & view.__dict__.keys():
        view = view.__wrapped__
        yield view


_AS_VIEW = {"view_class", "cls"}
"""The attributes of a function that `as_view` returned, of Django and of Django REST framework."""


def _get_guard(view: Callable[..., Any], given: dict[str, Any], guards: _Guards) -> _DjangoGuard:
    """Return a new guard for a view, or that of its method: `method_decorator` decorates anew at each request."""
    bound: Any = list(_unwrap(view))[-1]
    if not isinstance(bound, functools.partial) or not ismethod(bound.func):
        return _DjangoGuard(given)
    of_class = guards.setdefault(type(bound.func.__self__), {})
    method = bound.func.__func__
    if (guard := of_class.get(method)) is None:
        guard = of_class.setdefault(method, _DjangoGuard(given))
    return guard


def _decorate(view: Callable[..., Any], given: dict[str, Any], guards: _Guards) -> Callable[..., Any]:
    _refuse_method(view)
    guard = _get_guard(view, given, guards)
    if iscoroutinefunction(view) or is_marked_async(view):

        @functools.wraps(view)
        async def call_guarded_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            _check_request(view, request)
            return await guard.run_async(request, functools.partial(view, request, *args, **kwargs))

        return call_guarded_async

    @functools.wraps(view)
    def call_guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        _check_request(view, request)
        return guard.run(request, functools.partial(view, request, *args, **kwargs), exempt.named)

    # Django would commit after the guard has stored the response. `_make_atomic` commits before.
    exempt = _Exempt(connections.settings)
    exempt.named |= getattr(view, "_non_atomic_requests", set())
    call_guarded._non_atomic_requests = exempt  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return call_guarded


class _Exempt(set[str]):
    """All databases, so that Django begins no transaction around the guard.

    `named` are those that `non_atomic_requests` names, on the view or around the guarded view.
    """

    def __init__(self, aliases: Iterable[str]) -> None:
        super().__init__(aliases)
        self.named = set[str]()

    def add(self, alias: str) -> None:
        """Add a database that `non_atomic_requests` names around the guarded view."""
        self.named.add(alias)


def _make_atomic(view: Callable[[], Any], exempt: set[str], is_guarded: bool) -> Callable[[], Any]:
    """Return the view in the transactions that ATOMIC_REQUESTS asks for, as Django's handler does.

    Without a response to store a view may be in one already: a guard around it stores the response after the commit,
    or none does.
    """
    for alias, database in connections.settings.items():
        if database["ATOMIC_REQUESTS"] and alias not in exempt:
            blocks = connections[alias].atomic_blocks
            if blocks and not blocks[-1]._from_testcase:  # a TestCase of Django runs in a transaction
                if not is_guarded:
                    continue
                raise RuntimeError(
                    f"idemgate: this view runs in a transaction of the database {alias!r} (ATOMIC_REQUESTS), which "
                    "would commit after the response is stored. Put @idempotent above @api_view, wrap all of it in "
                    "idempotent(View.as_view()), or put @transaction.non_atomic_requests outermost"
                )
            view = transaction.atomic(using=alias, durable=True)(view)
    return view


class _DjangoGuard:
    """The guard of the middleware or of one view."""

    def __init__(self, given: dict[str, Any]) -> None:
        options = _read_settings() | given
        gate = options.pop("gate", default_gate)
        self._core = HttpGuard(gate, cast("ShieldOptions", options), ShieldOptions)
        self._outliving = Outliving(self._core)

    def run(self, request: HttpRequest, view: Callable[[], Any], exempt: set[str] | None = None) -> Any:
        """Return the response to a request: refused, replayed, or that of the view.

        `exempt` names the databases without ATOMIC_REQUESTS for this view. None: Django begins the transactions.
        """
        admission = self._admit(request)
        if admission is not None and not isinstance(admission, Admission):
            return admission
        if exempt is not None:
            view = _make_atomic(view, exempt, admission is not None)
        return view() if admission is None else run_view(self._core, admission, _ADAPTER, view)

    async def run_async(self, request: HttpRequest, view: Callable[[], Awaitable[Any]]) -> Any:
        """Return the response to a request; see `run`."""
        # In a thread, because `caller` may read the user of the request from the database.
        admission = None if self._passes(request) else await sync_to_async(self._admit)(request)
        if isinstance(admission, Admission):
            return await run_view_async(self._core, admission, _ADAPTER, view, self._outliving)
        return await view() if admission is None else admission

    def _admit(self, request: HttpRequest) -> Admission | HttpResponseBase | None:
        """Decide about a request: guard it, refuse it, or pass it on (None)."""
        if self._passes(request):
            return None
        selected = self._core.select(_read_request(request))
        if selected is None:
            return None
        admission = selected if isinstance(selected, Response) else self._read_body(request, selected)
        if isinstance(admission, Response):
            return _ADAPTER.build(request, admission)
        request.META[MARK] = self._core.mark
        return admission

    def _passes(self, request: HttpRequest) -> bool:
        """Return True for a request that is not for this guard, or that one around it guards."""
        scope: dict[str, Any] = getattr(request, "scope", {})
        marks = (request.META.get(MARK), scope.get(MARK))
        return any(self._core.passes(request.method or "", mark) for mark in marks)

    def _read_body(self, request: HttpRequest, selected: Any) -> Admission | Response | None:
        is_form = False
        try:
            body = request.body
        except RequestDataTooBig:  # DATA_UPLOAD_MAX_MEMORY_SIZE
            return self._core.refuse("body-too-large")
        except RawPostDataException:  # CsrfViewMiddleware and others parse a multipart form before a decorated view
            if not (request.POST or request.FILES or _is_form(request, selected.request)):
                raise
            body, is_form = pack_form(request.POST, request.FILES), True
        return self._core.admit(selected, body, is_form=is_form)


def _is_form(request: Any, read: Request) -> bool:
    """Return True if Django or Django REST framework has read the body as a form, which may be empty."""
    if isinstance(request.upload_handlers, ImmutableList):  # since Django has parsed the body
        return True
    is_form = read.media_type.partition(";")[0] in ("multipart/form-data", "application/x-www-form-urlencoded")
    return is_form and hasattr(request, "_request") and request.stream is request._request


def _read_request(request: HttpRequest) -> Request:
    # Django has decoded it: that of ASGI, which has a scope, from UTF-8.
    query = request.META.get("QUERY_STRING", "").encode("utf-8" if hasattr(request, "scope") else "latin-1")
    headers = Headers((str(name), str(value)) for name, value in request.headers.items())
    return Request(request.method or "", request.path, query, headers, request)


def _read_settings() -> dict[str, Any]:
    """Return the options of the setting by their lower-case names. Raise InvalidArgument if it is no dict."""
    given = getattr(conf.settings, _SETTING, {})
    if not isinstance(given, dict):
        raise InvalidArgument(_SETTING, given, "not a dict", f'Write {_SETTING} = {{"GATE": ..., "CALLER": ...}}')
    options = {str(name).lower(): value for name, value in cast("dict[object, Any]", given).items()}
    for name in ("gate", *_CALLABLES):
        if isinstance(options.get(name), str):
            options[name] = import_string(options[name])
    return options


class _Answer(HttpResponse):  # type: ignore[misc] # Django has no types
    """The answer of the guard: a replay or a problem."""

    @property
    def data(self) -> object:
        """Raise AttributeError: this is what a view has already rendered, or a problem."""
        raise AttributeError(
            f"this response {self.status_code} is idemgate's answer to a retry, which has no .data. To change what the "
            "guarded method returns, put @method_decorator(idempotent) on the method that makes the final response"
        )


class _RenderedAnswer(_Answer, SimpleTemplateResponse):  # type: ignore[misc] # Django has no types
    """The answer to a request that is not routed: a test calls the view without a handler, and renders its response.

    A handler would pass it to the template middleware, which has completed the stored response.
    """


class _DjangoAdapter:
    """Responses of Django as values."""

    def read(self, response: Any) -> Response | tuple[int, str]:
        """Return a response as a value. One that streams cannot be kept."""
        if self.is_late(response):
            return response.status_code, UNRENDERED
        if response.streaming:
            return response.status_code, STREAMED
        return Response(response.status_code, tuple(response.items()), response.content)

    def get_status(self, response: Any) -> int:
        """Return the status of a response."""
        return int(response.status_code)

    def is_late(self, response: Any) -> bool:
        """Return True for a response of a template or of Django REST framework that is not rendered yet.

        Only the view around a method, and middleware, complete it. Rendered in the guard it would raise, or be another.
        """
        return not getattr(response, "is_rendered", True)

    def defer(self, request: Any, response: Any, late: Late[Any]) -> None:
        """Record a response in a callback after its rendering, before what outer decorators change in theirs.

        Django closes the request with the response that it sends. By then this one is rendered, or never will be.
        """
        request = getattr(request, "_request", request)  # that of Django, inside the one of Django REST framework
        render, close = response.render, request.close

        def render_renewed() -> Any:
            del response.render  # what is set here cannot be pickled, as caches do
            request.__dict__.pop("close", None)
            with late.hold():
                try:
                    return render()
                except BaseException as error:
                    late.fail(error)
                    raise

        def close_unrendered() -> None:
            request.__dict__.pop("close", None)
            late.discard()
            close()

        response.render = render_renewed
        response.add_post_render_callback(late.record)
        request.close = close_unrendered

    def build(self, request: Any, response: Response) -> HttpResponse:
        """Return a value as a response. Fields of one name are joined, because a response of Django has one of each."""
        if request.resolver_match is None:
            built: HttpResponse = _RenderedAnswer("", status=response.status)
            built.content = response.body
        else:
            built = _Answer(response.body, status=response.status)
        del built["content-type"]
        for name, value in response.headers:
            built[name] = f"{built[name]}, {value}" if name in built else value
        return built


_ADAPTER = _DjangoAdapter()
_Guards = MutableMapping[type, dict[Callable[..., Any], _DjangoGuard]]
_GUARDS: _Guards = WeakKeyDictionary()
"""The guards of methods that are decorated without options, by their class."""
