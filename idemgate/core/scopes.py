"""The default scopes of functions: their names, and a warning where two functions take one."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from inspect import isbuiltin
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Protocol

from idemgate.errors import InvalidArgument

__all__ = ["DefaultScopes", "check_unregistered", "mark_registered", "module_of", "qualified_name", "scope_of"]

log: logging.Logger = logging.getLogger("idemgate.once")

_MAIN = ("__main__", "__mp_main__")
"""The names of the module that a program starts with, in the program and in the children of multiprocessing."""


def qualified_name(func: Any) -> str:
    """Return the module and qualified name of `func`, for logs and errors.

    A partial is named by its function, and a callable object by its class.
    """
    while isinstance(func, functools.partial):
        func = func.func
    owner: Any = func if hasattr(func, "__qualname__") else func.__class__
    return f"{module_of(owner) or owner.__module__}.{_plain(owner.__qualname__)}"


def scope_of(func: Any, name: str = "scope") -> str:
    """Return the default scope of a function: its module and qualified name.

    A module that runs as a program has its importable name: that of `python -m shop.app` is `shop.app`, and that of
    `python app.py` is `app`.

    Args:
        func: the function.
        name: the parameter to name in the error.

    Raises:
        InvalidArgument: `func` has no unique name. That is a lambda, a partial, an object with `__call__`, or a
            function of an interactive session or of `python -c`.
    """
    qualname = getattr(func, "__qualname__", None)
    fix = f'Pass {name}="shop.charge", or another name that nothing else has'
    if isinstance(func, functools.partial) or not isinstance(qualname, str):
        kind = "a partial" if isinstance(func, functools.partial) else "an object with __call__"
        raise InvalidArgument(name, qualified_name(func), f"{kind} has no unique name", fix)
    if "<lambda>" in qualname:
        raise InvalidArgument(name, qualified_name(func), "a lambda has no unique name", fix)
    module = module_of(func)
    if not module:
        problem = "the function is defined in an interactive session or without a file, as in every such program"
        raise InvalidArgument(name, qualified_name(func), problem, fix)
    return f"{module}.{_plain(qualname)}"


def _plain(qualname: str) -> str:
    return qualname.replace("<locals>.", "").replace("<lambda>", "lambda")


def module_of(func: Any) -> str:
    """Return the name by which the module of `func` can be imported, or "" if a program has no such name."""
    module = getattr(func, "__module__", None) or ""
    if module not in _MAIN:
        return str(module)
    variables = next(_main_variables(func, module), dict[str, Any]())
    spec, file = variables.get("__spec__"), variables.get("__file__")
    if spec is not None and spec.name not in _MAIN:  # python -m shop.app
        return str(spec.name)
    return "" if file is None else _name_of_file(Path(file))


def _main_variables(func: Any, module: str) -> Iterator[dict[str, Any]]:
    """Yield the variables of the main module. A profiler or debugger has another main module in `sys.modules`."""
    while func is not None:
        variables = getattr(func, "__globals__", {})
        if variables.get("__name__") == module:
            yield variables
        func = getattr(func, "__wrapped__", None)
    if module in sys.modules:
        yield vars(sys.modules[module])


def _name_of_file(file: Path) -> str:
    """Return the name of a script, with the packages around it."""
    if file.name.startswith("<"):  # "<stdin>"
        return ""
    parts = [file.stem]
    for folder in file.absolute().parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.append(folder.name)
    return "" if parts == ["__main__"] else ".".join(reversed(parts))


class _KeySpec(Protocol):
    def of(self, instance: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> str | bytes | int: ...


class DefaultScopes:
    """The default scopes that the functions of one gate have.

    Two functions of one scope get each other's results. So a warning, once for each scope, says where a second function
    takes a scope, and where objects of a second class call an inherited method.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[], object]] = {}
        self._classes: dict[str, type] = {}
        self._warned: set[str] = set()

    def add(self, scope: str, func: Callable[..., object], key: _KeySpec) -> _KeySpec:
        """Add a function that takes a default scope. Return its key, which for a method watches the classes."""
        known = self._functions.get(scope, lambda: None)()
        if known is not None and known is not func:
            self._warn(scope, "another function has this scope")
        try:
            self._functions[scope] = weakref.ref(func)
        except TypeError:  # an object without weak references
            self._functions[scope] = lambda: func
        around = func.__qualname__.rpartition(".")[0]
        return _MethodKey(self, scope, key) if around and not around.endswith("<locals>") else key

    def add_class(self, scope: str, cls: type) -> None:
        """Add a class whose object calls a method of a default scope."""
        known = self._classes.setdefault(scope, cls)
        if known is not cls:
            self._warn(scope, f"objects of {known.__qualname__} and {cls.__qualname__} share this inherited method")

    def _warn(self, scope: str, reason: str) -> None:
        if scope not in self._warned:
            self._warned.add(scope)
            log.warning(
                "once.scope_shared scope=%s: %s, so they get each other's results. Pass scope=, or put into the key "
                "what tells them apart", scope, reason, extra={"scope": scope, "reason": reason},
            )  # fmt: skip


class _MethodKey:
    """The key of a method with a default scope. It watches the classes of the objects."""

    __slots__ = ("_class", "_scope", "_scopes", "_spec")

    def __init__(self, scopes: DefaultScopes, scope: str, spec: _KeySpec) -> None:
        self._scopes = scopes
        self._scope = scope
        self._spec = spec
        self._class: type | None = None

    def of(self, instance: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | bytes | int:
        if instance is not None:
            cls = instance if isinstance(instance, type) else type(instance)  # that of a classmethod is a class
            if cls is not self._class:
                self._scopes.add_class(self._scope, cls)
                self._class = cls
        return self._spec.of(instance, args, kwargs)


_registered: dict[str, weakref.WeakValueDictionary[object, Any]] = {}
"""For each decorator that takes a function and returns it unchanged: the objects it took, by identity."""
_TASKS = {
    "celery.local": "app.task",  # a task that is built at its first use
    "celery.app.task": "app.task",
    "dramatiq.actor": "dramatiq.actor",
    "huey.api": "huey.task",
    "taskiq.decor": "broker.task",
    "procrastinate.tasks": "app.task",
    "django.tasks.base": "task",
    "django_tasks.base": "task",
}
"""The modules of the classes of task queues whose objects stand for a function, and the decorators that make them."""


def _identify(func: Any) -> tuple[object, Any]:
    """Return a name and the object that it belongs to. A bound method is a new object at each access."""
    if type(func) is MethodType:
        return (id(func.__self__), id(func.__func__)), func.__self__
    return id(func), func


def mark_registered(func: Any, by: str) -> None:
    """Remember that a decorator took this very object, so that a guard above it would guard nothing.

    By identity, because a guarded function equals the function that it wraps. A builtin never stands below decorators.
    """
    if isbuiltin(func):
        return
    name, owner = _identify(func)
    with contextlib.suppress(TypeError):  # an object without weak references
        _registered.setdefault(by, weakref.WeakValueDictionary())[name] = owner


def check_unregistered(func: Any, caller: str) -> None:
    """Raise InvalidArgument if a decorator below the guard has registered the function, or one that it wraps.

    The decorators of web frameworks leave no trace at the function.
    """
    inner = func
    for _ in range(32):  # an object may invent each attribute
        if (by := _find_registration(inner)) is not None:
            problem = f"@{by} below has registered it without this guard"
            raise InvalidArgument("function", qualified_name(func), problem, f"Write @{caller} below @{by}")
        inner = getattr(inner, "__func__", getattr(inner, "__wrapped__", None))
        if inner is None:
            return


def _find_registration(func: object) -> str | None:
    """Return the decorator that has registered this object, or None."""
    name, owner = _identify(func)
    for by, objects in _registered.items():
        if objects.get(name, objects) is owner:
            return by
    kind = type(func)
    if kind is FunctionType:
        return "job" if callable(func.__dict__.get("delay")) else None  # of RQ
    return next((_TASKS[base.__module__] for base in kind.__mro__ if base.__module__ in _TASKS), None)
