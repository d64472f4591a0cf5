"""The options that a guard with a sink refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from idemgate.core.scopes import qualified_name
from idemgate.core.validation import is_async
from idemgate.errors import InvalidArgument
from idemgate.guard.sink.protocol import AioSink, Sink

__all__ = ["check_flavour", "check_sink"]

_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "at_most_once": ((True,), "the key would be done before the transaction of the sink"),
    "shadow": ((True,), "duplicates would run, and the sink would refuse them"),
    "on_error": (
        ("store", "complete"),
        "the transaction of a run that raises is rolled back, so a sink stores nothing",
    ),
}


def check_sink(sink: object, options: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if `sink` is no sink, or an option has no meaning with one."""
    if isinstance(sink, type) or not callable(getattr(sink, "apply", None)):
        raise InvalidArgument("sink", sink, "not an object with the method `apply`", "Pass an inbox of idemgate_sql")
    for name, (refused, problem) in _REFUSED.items():
        if (value := options.get(name)) in refused:
            raise InvalidArgument(name, value, problem, f"Drop {name}, or sink")
    if (retry := options.get("retry")) is not None and _retries_results(retry.retry):
        problem = "a policy that retries results; a sink commits the first result"
        raise InvalidArgument("retry", retry, problem, "Raise an exception to retry, such as with retry_if_exception")


def _retries_results(condition: object) -> bool:
    """Return True if a tenacity condition looks at results."""
    import tenacity

    if isinstance(condition, tenacity.retry_if_result | tenacity.retry_if_not_result):
        return True
    return any(_retries_results(one) for one in getattr(condition, "retries", ()))


def check_flavour(sink: Sink | AioSink, func: Callable[..., Any]) -> None:
    """Raise InvalidArgument if one of the sink and the function is async and the other is not."""
    if is_async(sink.apply) != is_async(func):
        kind, other = ("async", "blocking") if is_async(sink.apply) else ("blocking", "async")
        fix = f"Pass an inbox for {other} functions: AsyncInbox is for async ones, Inbox for the others"
        raise InvalidArgument("sink", sink, f"a sink for {kind} functions on {qualified_name(func)}", fix)
