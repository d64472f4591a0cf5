"""Every exception passes between processes: with its class, text, attributes, notes, cause and context."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import pytest

import idemgate
from idemgate import errors
from idemgate.core.calls import Incomplete
from idemgate.errors import AlreadyDone, AlreadyInProgress, InvalidArgument, KeyReused, PartialFailure, StoreUnavailable
from tests.for_each import for_each

PACKAGES = (
    "idemgate",
    "idemgate_aws",
    "idemgate_http",
    "idemgate_kafka",
    "idemgate_webhook",
    "idemgate_rabbitmq",
    "idemgate_zookeeper",
    "idemgate_otel",
)
INTERNAL = {Incomplete}
"""Control flow inside one call, which holds functions. No caller gets it."""


def modules() -> Iterator[Any]:
    for name in PACKAGES:
        package = pytest.importorskip(name)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):  # confluent-kafka has no wheels for Python 3.15 yet
                    yield importlib.import_module(found.name)


def classes() -> list[type[BaseException]]:
    """Every exception class that a module of the packages defines."""
    found = {
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__.startswith("idemgate")
    }
    return sorted(found - INTERNAL, key=lambda cls: cls.__qualname__)


def build(cls: type[BaseException]) -> BaseException:
    """Call the constructor with a value for each parameter, by its annotation."""
    values = {
        "str": "text", "float": 2.5, "int": 15, "bool": True, "object": {"a": 1}, "Any": ["a"], "bytes": b"2",
        "dict[str, object]": {"slots": 8},
    }  # fmt: skip
    if not inspect.isfunction(cls.__init__):
        return cls("text")
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    named: dict[str, Any] = {}
    for each in parameters:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            kind = each.annotation if isinstance(each.annotation, str) else getattr(each.annotation, "__name__", "Any")
            named[each.name] = "store" if "Literal" in kind else values.get(kind, each.default)
            if named[each.name] is each.empty:
                named[each.name] = "text"
    return cls(**named)


def facts(error: BaseException) -> tuple[Any, ...]:
    return type(error), str(error), repr(error), error.args, {**vars(error)}


def raised(error: BaseException) -> BaseException:
    """Raise the error inside the handling of another one, with a cause and a note."""
    error.add_note("a note")
    try:
        try:
            raise KeyError("context")
        except KeyError:
            raise error from ValueError("cause")
    except BaseException as caught:
        return caught


ALL = [pytest.param(cls, id=f"{cls.__module__}.{cls.__qualname__}") for cls in classes()]


def test_all_classes_are_tried() -> None:
    named = {getattr(errors, name) for name in errors.__all__}
    assert named < {*classes()}
    assert len(ALL) > len(named) + 5


@for_each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@for_each("cls", ALL)
def test_an_exception_is_the_same_after_pickle(cls: type[BaseException], protocol: int) -> None:
    error = build(cls)
    assert facts(pickle.loads(pickle.dumps(error, protocol))) == facts(error)
    assert facts(copy.copy(error)) == facts(copy.deepcopy(error)) == facts(error)


@for_each("cls", [errors.Bury, *(getattr(errors, name) for name in errors.__all__)])
def test_the_cause_the_context_and_the_notes_come_along(cls: type[BaseException]) -> None:
    error = raised(build(cls))
    found = pickle.loads(pickle.dumps(error))
    assert repr(found.__cause__) == "ValueError('cause')"
    assert repr(found.__context__) == "KeyError('context')"
    assert found.__suppress_context__
    assert found.__notes__ == ["a note"]
    hidden = build(cls)
    hidden.__context__ = KeyError("context")
    found = pickle.loads(pickle.dumps(hidden))
    assert (found.__cause__, repr(found.__context__), found.__suppress_context__) == (
        None,
        "KeyError('context')",
        False,
    )


@for_each("name", errors.__all__)
def test_the_arguments_make_an_equal_exception(name: str) -> None:
    # Celery stores `args` as JSON and calls the class with them.
    error = build(getattr(errors, name))
    stored = json.loads(json.dumps(error.args))
    found = type(error)(*stored)
    assert (str(found), found.args) == (str(error), error.args)


def test_a_result_is_not_among_the_arguments() -> None:
    error = AlreadyDone("k", {"card": "4242"}, "pay")
    assert "4242" not in repr(error.args) + repr(error) + str(error)
    assert pickle.loads(pickle.dumps(error)).result == {"card": "4242"}


class Locked:
    """A value that pickle refuses."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "<Locked>"


class Unreadable(Exception):
    """An exception that pickle writes and cannot read."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")


class Speechless(Unreadable):
    def __str__(self) -> str:
        raise RuntimeError


def test_what_pickle_cannot_copy_is_described() -> None:
    error = InvalidArgument("payload", Locked(), "cannot be stored", "Pass a dict")
    found = pickle.loads(pickle.dumps(error))
    assert (found.value, str(found)) == ("<Locked>", str(error))
    failed = PartialFailure([Locked()], "no")
    assert pickle.loads(pickle.dumps(failed)).items == "[<Locked>]"
    away = StoreUnavailable("away", "no")
    away.__cause__, away.__context__ = Unreadable(1, "x"), Speechless(1, "x")
    found = pickle.loads(pickle.dumps(away))
    assert repr(found.__cause__) == f"RuntimeError('{__name__}.Unreadable: 1 x')"
    assert repr(found.__context__) == f"RuntimeError('{__name__}.Speechless')"
    assert found.executed == "no"


class Named(KeyReused):
    """A subclass of a user, with parameters of its own."""

    def __init__(self, order: int, *, shop: str) -> None:
        super().__init__(f"{shop}-{order}")
        self.shop = shop


def test_a_subclass_with_other_parameters_is_the_same_after_pickle() -> None:
    error = Named(7, shop="s")
    assert facts(pickle.loads(pickle.dumps(error))) == facts(error)


def _raise(error: BaseException) -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        raise error  # noqa: B904


def test_exceptions_leave_a_process_pool_and_do_not_break_it() -> None:
    found = {getattr(errors, name) for name in errors.__all__}
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        for cls in found:
            error = build(cls)
            caught = pool.submit(_raise, error).exception()
            assert caught is not None
            assert facts(caught) == facts(error)
            assert repr(caught.__context__) == "ValueError('inner')"
            assert "inner" in str(caught.__cause__)  # the pool's own: the traceback in the other process


def test_the_text_of_a_rejected_claim_names_its_scope() -> None:
    assert "'pay'" in str(AlreadyInProgress("k", 1.0, "pay"))
    for name in errors.__all__:
        cls = getattr(errors, name)
        if issubclass(cls, errors.ClaimRejected) and cls is not errors.ClaimRejected:
            named = {each: "x" for each in ("key", "why", "kind", "text") if each in inspect.signature(cls).parameters}
            counted = {
                each: 1
                for each in ("retry_after", "token", "attempt", "attempts")
                if each in inspect.signature(cls).parameters
            }
            assert "'shop.pay'" in str(cls(**named, **counted, scope="shop.pay")), cls


def test_the_front_door_has_the_same_classes() -> None:
    assert idemgate.AlreadyInProgress is AlreadyInProgress


def test_exceptions_pass_through_the_json_of_celery() -> None:
    celery = pytest.importorskip("celery")
    backend = celery.Celery("shop", backend="cache+memory://").backend
    for name in errors.__all__:
        error = build(getattr(errors, name))
        found = backend.exception_to_python(backend.decode(backend.encode(backend.prepare_exception(error, "json"))))
        assert (type(found), str(found)) == (type(error), str(error))
