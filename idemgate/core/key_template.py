"""The `key=` and `fingerprint=` of the decorators: compiled once, when the function is decorated.

A template is text with fields, such as "{event[id]}", "{order.id}" or "{a}:{b}". A field is a parameter of the
function, followed by members ([id], or [0] for a list) and attributes (.id, without a leading underscore).

With two or more fields, the separators are percent-encoded inside the values, so no two pairs of values share a key.
For "{a}:{b}" these are `:` and `%`: ("x:y", "z") becomes `x%3Ay:z`. The value of a single field is not encoded.

A call is (instance, args, kwargs), as in wrapt. With an instance, `args` lack the first parameter. Without one, `args`
contain it: for a plain function, or a decorator that leaves `self` in `args`. Both are supported.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from inspect import Parameter, Signature, isabstract, iscoroutinefunction, ismethod, isroutine, signature, unwrap
from string import Formatter
from types import ModuleType, UnionType
from typing import Any, Generic, Protocol, TypeVar, cast, get_origin, overload
from uuid import UUID

from idemgate.core.codec import digest
from idemgate.core.codec.packing import decimal_text
from idemgate.core.scopes import qualified_name
from idemgate.core.validation import type_hints
from idemgate.errors import InvalidArgument, MissingKey

__all__ = [
    "Arguments", "FingerprintSpec", "KeyCallable", "KeySpec", "check_message_fields", "compile_fingerprint",
    "compile_key", "compile_message_fingerprint", "compile_message_key",
]  # fmt: skip

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Find = Callable[[object, Args, Kwargs], Any]
_FIELD = re.compile(r"([^\W\d]\w*)((?:\.[^.\[\]]+|\[[^\[\]]+\])*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\[\]]+)\]")
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_LIKE = 'Write it as in "{event[id]}", "{order.id}" or "{a}:{b}", or pass a callable'
_NAMES_LIKE = 'Name fields without braces, as in "amount" or ["order.id", "event[total]"], or pass a callable'


class _AnyCallable(Protocol):
    """Any callable. It is overloaded, so that pyright infers the parameters of a lambda from the types beside it."""

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> object: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> object: ...  # type: ignore[overload-cannot-match]  # pyright: ignore[reportOverlappingOverload]


KeyCallable = Callable[[Any], object] | Callable[[Any, Any], object] | Callable[[Any, Any, Any], object] | _AnyCallable
"""A callable for `key=` or `fingerprint=`. The parameters of a lambda in its place are of type Any."""
T_co = TypeVar("T_co", covariant=True)


class _Spec(Protocol[T_co]):
    def of(self, instance: object, args: Args, kwargs: Kwargs, /) -> T_co: ...


class KeySpec(Protocol):
    """A compiled `key=`. `instance` is the object of a bound method, which `args` then lack; else None."""

    def of(self, instance: object, args: Args, kwargs: Kwargs, /) -> str | bytes | int:
        """Return the key of a call, never empty.

        Raises:
            InvalidArgument: a field has no valid value. The error names the field.
            TypeError: an argument is missing, as in the call itself.
        """
        ...


class FingerprintSpec(Protocol):
    """A compiled `fingerprint=`."""

    def of(self, instance: object, args: Args, kwargs: Kwargs, /) -> bytes:
        """Return the fingerprint of a call, 16 bytes."""
        ...


def compile_message_key(spec: str | Callable[..., object]) -> KeySpec:
    """Compile the `key=` of a guard, which has no function: its template has one name, which stands for the message.

    A callable gets the arguments of the handler. Raise InvalidArgument.
    """
    if callable(spec):
        return _Called(_check_plain(spec, "key"))
    if not isinstance(spec, str):
        raise InvalidArgument("key", spec, "is neither a template nor a callable", _LIKE)
    return _template(spec, _MessageArgument())


def compile_message_fingerprint(spec: Sequence[str] | Callable[..., object]) -> FingerprintSpec:
    """Compile the `fingerprint=` of a guard; see `compile_message_key`."""
    if callable(spec):
        return _CalledFingerprint(_check_plain(spec, "fingerprint"))
    return _fingerprint(spec, _MessageArgument())


def compile_key(spec: str | Callable[..., object] | None, func: Callable[..., object]) -> KeySpec:
    """Compile `key=`.

    Args:
        spec: a template, a callable with the function's parameters (`self` first), or None. None uses a hash of all
            arguments with defaults; they must be of types that the codec supports. A method, a classmethod, an object
            with `__call__` and a partial hold more than their arguments, so they need a key.
        func: the decorated function.

    Raises:
        InvalidArgument: the template or callable does not fit the parameters of `func`.
    """
    if callable(spec):
        return _bound(_Called(_check_callable(spec, "key", func)), func)
    if spec is None:
        if (held := _find_held(func)) is not None:
            raise _refuse_held(func, *held)
        arguments = _arguments(func, "key", spec)
        if arguments.of_method:
            raise _refuse_held(func, *(_OBJECT if arguments.names[0] == "self" else _CLASS))
        return _AllArguments(arguments, func)
    if not isinstance(spec, str):
        raise InvalidArgument("key", spec, "is neither a template nor a callable", _LIKE)
    return _bound(_template(spec, _arguments(func, "key", spec)), func)


def compile_fingerprint(
    spec: Sequence[str] | Callable[..., object] | None, func: Callable[..., object]
) -> FingerprintSpec | None:
    """Compile `fingerprint=`.

    Args:
        spec: fields ("amount", "event[total]") or a callable; None for no fingerprint. The values must be of types
            that the codec supports.
        func: the decorated function.

    Raises:
        InvalidArgument: a field is not a parameter of `func`, or the callable does not fit them.
    """
    if spec is None:
        return None
    if callable(spec):
        return _bound(_CalledFingerprint(_check_callable(spec, "fingerprint", func)), func)
    return _bound(_fingerprint(spec, _arguments(func, "fingerprint", spec)), func)


class _Field:
    """A field of a template: an argument and the path inside it."""

    __slots__ = ("find", "name", "path", "written")

    def __init__(self, written: str, find: Find, path: tuple[tuple[bool, str | int], ...], name: str) -> None:
        self.written = written
        self.name = f"{name} field {{{written}}}"
        self.find = find
        self.path = path

    def value(self, instance: object, args: Args, kwargs: Kwargs) -> Any:
        value = self.find(instance, args, kwargs)
        try:
            for is_member, step in self.path:
                value = value[step] if is_member else getattr(value, step)  # type: ignore[arg-type]
        except (LookupError, AttributeError, TypeError) as error:
            problem = f"has nothing there ({type(error).__name__}: {error})"
            raise MissingKey(self.name, value, problem, "Members are {event[id]}, attributes {event.id}") from error
        return value

    def text(self, instance: object, args: Args, kwargs: Kwargs) -> str:
        return part_text(self.value(instance, args, kwargs), self.name)


class _OneField:
    __slots__ = ("_after", "_before", "_field")

    def __init__(self, before: str, field: _Field, after: str) -> None:
        self._before = before
        self._field = field
        self._after = after

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> str:
        value = self._field.value(instance, args, kwargs)
        if type(value) is not str or not value:
            value = part_text(value, self._field.name)
        key = self._before + value + self._after
        return key if key.isascii() else check_encodes(key, self._field.name)


class _OneArgument:
    """A template with a single field that has no path. It saves the path lookup of `_OneField`."""

    __slots__ = ("_after", "_before", "_find", "_name")

    def __init__(self, before: str, field: _Field, after: str) -> None:
        self._before = before
        self._find = field.find
        self._name = field.name
        self._after = after

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> str:
        value = self._find(instance, args, kwargs)
        if type(value) is not str or not value:
            value = part_text(value, self._name)
        key: str = self._before + value + self._after
        return key if key.isascii() else check_encodes(key, self._name)


class _ManyFields:
    __slots__ = ("_after", "_escapes", "_parts")

    def __init__(self, parts: list[tuple[str, _Field]], after: str, separators: set[str]) -> None:
        self._parts = parts
        self._after = after
        self._escapes = {ord(char): _percent(char) for char in separators | {"%"}}

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> str:
        key = "".join(
            before + check_encodes(field.text(instance, args, kwargs), field.name).translate(self._escapes)
            for before, field in self._parts
        )
        return key + self._after


class _Called:
    __slots__ = ("_spec",)

    def __init__(self, spec: Callable[..., object]) -> None:
        self._spec = spec

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> str | bytes | int:
        value = self._spec(*args, **kwargs) if instance is None else self._spec(instance, *args, **kwargs)
        if (type(value) is bytes and value) or type(value) is int:
            return value
        return check_encodes(part_text(value, "key callable"), "key callable")


class _AllArguments:
    __slots__ = ("_arguments", "_func")

    def __init__(self, arguments: Arguments, func: Callable[..., object]) -> None:
        self._arguments = arguments
        self._func = func

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> str:
        if instance is not None and not isinstance(instance, ModuleType):
            raise _refuse_held(self._func, *(_CLASS if isinstance(instance, type) else _OBJECT))
        try:
            return digest(self._arguments.all(instance, args, kwargs), name="arguments").hex()
        except InvalidArgument as error:
            fix = 'Name what identifies the work, as in key="{event[id]}": without key= every argument counts'
            raise InvalidArgument(error.name, error.value, error.problem, fix) from None


_OBJECT = (
    "is a method, and the arguments alone do not tell its objects apart",
    'Name what identifies the object and the work, as in key="{self.id}:{amount}"',
)
_CLASS = (
    "is a classmethod, and the arguments alone do not tell its classes apart",
    'Name what identifies the class and the work, as in key=lambda cls, day: f"{cls.__name__}:{day}"',
)
_CALLED = (
    "is an object with __call__, and the arguments alone do not tell such objects apart",
    'Name what identifies the work, as in key=lambda amount: f"{credit.account}:{amount}"',
)
_PARTIAL = (
    "is a partial, and the arguments that it holds do not count",
    "Decorate the function itself and pass all arguments, or name what identifies the work in key=",
)


def check_message_fields(
    kind: type[object], key: str | Callable[..., object], fingerprint: Sequence[str] | Callable[..., object] | None
) -> None:
    """Raise InvalidArgument for fields that no message of this class has: each message would be a dead letter."""

    def takes(message: object) -> None: ...

    takes.__annotations__["message"] = kind
    if isinstance(key, str):
        compile_key(key, takes)
    if not callable(fingerprint):
        compile_fingerprint(fingerprint, takes)


def _find_held(func: Any) -> tuple[str, str] | None:
    """Return the problem and the fix if a callable holds what its arguments do not show, else None.

    What a decorator returned (`__wrapped__`) counts as its function. The keywords of a partial are defaults.
    """
    if (inner := getattr(func, "__wrapped__", None)) is not None:
        return _find_held(inner)
    if isinstance(func, partial):
        return _PARTIAL if func.args or _find_held(func.func) else None
    if ismethod(func):
        return _CLASS if isinstance(func.__self__, type) else _OBJECT
    if isinstance(func, classmethod):
        return _CLASS
    return None if isroutine(func) or isinstance(func, type | staticmethod) else _CALLED


def _refuse_held(func: Any, problem: str, fix: str) -> InvalidArgument:
    return InvalidArgument("key", None, f"{qualified_name(getattr(func, '__func__', func))} {problem}", fix)


class _Fingerprint:
    __slots__ = ("_fields",)

    def __init__(self, fields: list[_Field]) -> None:
        self._fields = fields

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> bytes:
        values = {field.written: field.value(instance, args, kwargs) for field in self._fields}
        return digest(values, name="fingerprint")


class _CalledFingerprint:
    __slots__ = ("_spec",)

    def __init__(self, spec: Callable[..., object]) -> None:
        self._spec = spec

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> bytes:
        value = self._spec(*args, **kwargs) if instance is None else self._spec(instance, *args, **kwargs)
        return digest(value, name="fingerprint")


class _OfBound(Generic[T_co]):
    """The spec of a method that was bound when decorated. A plain call has no instance, so it is added here."""

    __slots__ = ("_instance", "_spec")

    def __init__(self, spec: _Spec[T_co], instance: object) -> None:
        self._spec = spec
        self._instance = instance

    def of(self, instance: object, args: Args, kwargs: Kwargs) -> T_co:
        return self._spec.of(self._instance if instance is None else instance, args, kwargs)


def _bound(spec: _Spec[T_co], func: Callable[..., object]) -> _Spec[T_co]:
    return _OfBound(spec, func.__self__) if ismethod(func) else spec


def _fingerprint(spec: Sequence[str], arguments: Arguments) -> _Fingerprint:
    if not isinstance(spec, Iterable):
        raise InvalidArgument("fingerprint", spec, "names no fields", _NAMES_LIKE)
    names = [spec] if isinstance(spec, str) else list(spec)
    if not names:
        raise InvalidArgument("fingerprint", spec, "names nothing", "Name parameters, or pass None for no fingerprint")
    return _Fingerprint([_field(name, arguments, "fingerprint", spec) for name in names])


def _arguments(func: Callable[..., object], name: str, spec: object) -> Arguments:
    try:
        return Arguments(func)
    except (ValueError, TypeError) as error:
        fix = f"Pass a callable as {name}="
        raise InvalidArgument(name, spec, f"the parameters of {func!r} cannot be known ({error})", fix) from error


def _check_callable(spec: Callable[..., object], name: str, func: Callable[..., object]) -> Callable[..., object]:
    """Return the callable. Raise InvalidArgument if it is async, or if no call of the function fits it."""
    _check_plain(spec, name)
    if not _accepts_calls(spec, getattr(func, "__func__", func)):
        problem = "does not take the arguments of the function"
        raise InvalidArgument(name, spec, problem, "Give it the parameters of the function, self included")
    return spec


def _check_plain(spec: Callable[..., object], name: str) -> Callable[..., object]:
    if iscoroutinefunction(spec):
        raise InvalidArgument(
            name, spec, "is a coroutine function", "Pass a plain function: it is called before anything waits"
        )
    return spec


def _accepts_calls(spec: Callable[..., object], func: Callable[..., object]) -> bool:
    """Return False if no call of the function fits the callable, with the optional arguments or without them."""
    if hasattr(func, "__wrapped__"):
        return True  # its decorator may pass arguments that callers do not
    try:
        parameters, accepted = signature(func).parameters.values(), signature(spec)
    except (ValueError, TypeError):  # of a builtin
        return True
    every = [one for one in parameters if one.kind not in _VARIADIC]
    required = [one for one in every if one.default is one.empty]
    return _fits(accepted, required) or _fits(accepted, every)


def _fits(accepted: Signature, arguments: Sequence[Parameter]) -> bool:
    """Return True if a signature accepts these arguments, some by position and the rest by name."""
    least = sum(one.kind is Parameter.POSITIONAL_ONLY for one in arguments)
    most = sum(one.kind is not Parameter.KEYWORD_ONLY for one in arguments)
    for split in range(least, most + 1):
        with suppress(TypeError):
            accepted.bind(*arguments[:split], **{one.name: one for one in arguments[split:]})
            return True
    return False


def _template(template: str, arguments: Arguments) -> KeySpec:
    parts: list[tuple[str, _Field]] = []
    before = ""
    for literal, written, options, conversion in _parse(check_encodes(template, "key")):
        before += literal
        if written is None:
            continue
        if options or conversion:
            problem = f"{{{written}}} has a format (after : or !), and two values could look the same in it"
            raise InvalidArgument("key", template, problem, "Leave the format out, or pass a callable")
        parts.append((before, _field(written, arguments, "key", template)))
        before = ""
    if not parts:
        raise InvalidArgument("key", template, "has no field, so all messages would share one key", _LIKE)
    if len(parts) == 1:
        one = _OneField if parts[0][1].path else _OneArgument
        return one(*parts[0], before)
    return _ManyFields(parts, before, {_separator(between, template) for between, _ in parts[1:]})


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidArgument("key", template, f"is not a template ({error})", _LIKE) from None


def _separator(between: str, template: str) -> str:
    """Return the character that ends a value. It is escaped in values, and no escape such as %3A contains it."""
    for char in between:
        if not char.isalnum() and char != "%":
            return char
    raise InvalidArgument(
        "key", template, "has fields that run into each other", 'Put ":" between them, as in "{a}:{b}"'
    )


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def _field(written: object, arguments: Arguments, name: str, spec: object) -> _Field:
    found = _FIELD.fullmatch(written) if isinstance(written, str) else None
    if found is None:
        shown, like = (repr(written), _NAMES_LIKE) if name == "fingerprint" else (f"{{{written}}}", _LIKE)
        raise InvalidArgument(name, spec, f"{shown} is not a field: fields start with the name of a parameter", like)
    find = arguments.find(found[1])
    if find is None:
        takes = ", ".join(arguments.names) or "none"
        raise InvalidArgument(
            name, spec, f"{{{written}}} is not a parameter of the function", f"Its parameters: {takes}"
        )
    path = tuple(_step(step, name, spec) for step in _STEP.finditer(found[2]))
    if (missing := _find_missing_step(arguments.hints.get(found[1]), path)) is not None:
        raise InvalidArgument(name, spec, f"{{{written}}}: {missing}", "Correct the field, or the annotation")
    return _Field(found[0], find, path, name)


def _step(step: re.Match[str], name: str, spec: object) -> tuple[bool, str | int]:
    """Return (is a member, key or attribute). As in str.format, digits in brackets are an index, other text a key."""
    attribute, member = step.groups()
    if attribute is None:
        return True, int(member) if member.isascii() and member.isdigit() else member
    if attribute.startswith("_") or not attribute.isidentifier():
        raise InvalidArgument(name, spec, f".{attribute} is not a public attribute", "Use a callable to reach it")
    return False, attribute


def _find_missing_step(hint: Any, path: tuple[tuple[bool, str | int], ...]) -> str | None:
    """Return what is missing in a path, as text for an error; None if the annotations do not rule the path out.

    Only types whose fields are declared can rule a path out: TypedDict, dataclasses, models of pydantic, named tuples,
    and classes without an instance `__dict__`, such as `Delivery` and `str`.

    Args:
        hint: The annotation of the parameter.
        path: The steps as (is a member, key or attribute).
    """
    for is_member, step in path:
        hint = get_origin(hint) or hint
        if not isinstance(hint, type) or hint is UnionType:
            return None
        is_typed_dict = hasattr(hint, "__required_keys__")
        if is_member:
            names = type_hints(hint) if is_typed_dict else {}
            if names and step not in names:
                return f"{hint.__name__} has no member [{step}]"
        else:
            declared = {} if is_typed_dict else _declared_attributes(hint)
            if declared is None:
                return None
            names = declared
            if step not in names and not hasattr(dict if is_typed_dict else hint, str(step)):
                return f"{hint.__name__} has no attribute .{step}"
        hint = names.get(str(step))
    return None


def _declared_attributes(kind: type) -> dict[str, Any] | None:
    """Return the declared attributes and their annotations; None if instances may have others."""
    if (fields := getattr(kind, "model_fields", None)) is not None:  # a model of pydantic
        allows_more = getattr(kind, "model_config", {}).get("extra") == "allow"
        return None if allows_more else {name: field.annotation for name, field in fields.items()}
    if hasattr(kind, "__getattr__") or isabstract(kind):
        return None
    if dataclasses.is_dataclass(kind):
        return dict.fromkeys(field.name for field in dataclasses.fields(kind)) | type_hints(kind)
    # Without an instance __dict__ every attribute is one of the class.
    has_dict = cast(Any, kind).__dictoffset__ != 0
    return type_hints(kind) if not has_dict and kind is not object else None


# -- the arguments of a call ------------------------------------------------------------------------------------------


_MISSING: Any = object()
_NOWHERE = sys.maxsize


def _unwrap(func: Callable[..., object]) -> Callable[..., object]:
    """Return the function of a bound method, classmethod or staticmethod. Its signature has `self` or `cls`."""
    if isinstance(func, (classmethod, staticmethod)) or ismethod(func):
        return cast(Callable[..., object], cast(Any, func).__func__)
    return func


class Arguments:
    """The parameters of `func`. Raises ValueError or TypeError for some builtins, as `inspect.signature` does."""

    __slots__ = ("_finds", "_held", "_rest", "hints", "names", "of_method")

    def __init__(self, func: Callable[..., object]) -> None:
        func = _unwrap(func)
        parameters = list(signature(func).parameters.values())
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        self.hints: dict[str, Any] = type_hints(func)
        self.names: tuple[str, ...] = tuple(parameter.name for parameter in parameters)
        self._held = {name: value for name, value in _held_keywords(func).items() if name not in named}
        self._finds = {p.name: _find(at, p, named, self._held) for at, p in enumerate(parameters)}
        self._rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.of_method: bool = _takes_self(func, self.names)

    def find(self, name: str) -> Find | None:
        """Return a function that finds the argument `name` of a call; None if there is no such parameter.

        With `**kwargs` every name is accepted, and a missing argument raises TypeError at the call.
        """
        found = self._finds.get(name)
        return _find_extra(name, self._held) if found is None and self._rest else found

    def all(self, instance: object, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        """Return all arguments by name with their defaults, without the instance or class of a method."""
        skip = instance is not None or self.of_method
        return {name: self._finds[name](instance, args, kwargs) for name in self.names[skip:]}


class _MessageArgument(Arguments):
    """The first argument of any handler, under the name that a template gives it first."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def find(self, name: str) -> Find | None:
        if not self.names:
            self.names = (name,)
            self._finds[name] = _find_one(0, Parameter(name, Parameter.POSITIONAL_ONLY))
        return self._finds.get(name)


def _held_keywords(func: Callable[..., object]) -> dict[str, Any]:
    """Return the keywords that a partial holds: those of `**kwargs` are no defaults in its signature."""
    held = dict[str, Any]()
    while isinstance(func := unwrap(func, stop=lambda one: isinstance(one, partial)), partial):
        held, func = func.keywords | held, func.func
    return held


def _find(at: int, parameter: Parameter, named: frozenset[str], held: Kwargs) -> Find:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return lambda instance, args, _: (args if instance is None else (instance, *args))[at:]
    if parameter.kind is parameter.VAR_KEYWORD:
        return lambda _instance, _args, kwargs: {
            name: value for name, value in ({**held, **kwargs} if held else kwargs).items() if name not in named
        }
    return _find_one(at, parameter)


def _takes_self(func: Callable[..., object], names: tuple[str, ...]) -> bool:
    """Return True for a function of a class body, such as `Shop.pay`, whose first parameter is `self` or `cls`."""
    around = getattr(func, "__qualname__", "").rpartition(".")[0]
    return bool(around) and not around.endswith("<locals>") and names[:1] in (("self",), ("cls",))


def _find_one(at: int, parameter: Parameter) -> Find:
    name = parameter.name
    at = _NOWHERE if parameter.kind is parameter.KEYWORD_ONLY else at
    # A positional-only name may also be a name in **kwargs, which is another argument.
    keyword = "" if parameter.kind is parameter.POSITIONAL_ONLY else name
    default = _MISSING if parameter.default is parameter.empty else parameter.default

    def find(instance: object, args: Args, kwargs: Kwargs) -> Any:
        place = at if instance is None else at - 1
        if place < len(args):
            return args[place] if place >= 0 else instance
        value = kwargs.get(keyword, default)
        if value is _MISSING:
            raise TypeError(f"missing a required argument: {name!r}")  # the same error as the call itself
        return value

    return find


def _find_extra(name: str, held: Kwargs) -> Find:
    def find(_instance: object, _args: Args, kwargs: Kwargs) -> Any:
        value = kwargs.get(name, held.get(name, _MISSING))
        if value is _MISSING:
            raise TypeError(f"missing a keyword argument: {name!r}")
        return value

    return find


# -- the text of a value ----------------------------------------------------------------------------------------------

_NO_NAME = "A missing key would make all such messages one; refuse the message, or name the work by something it has"
_KINDS = "Use a str, int, bytes, UUID, Decimal, Enum, date or aware datetime"


def part_text(value: object, name: str) -> str:
    """Return `value` as key text. Two values of one type have the same text if they are equal, and only then.

    Types are ignored: 7 and "7" are one key, since JSON and form data write the same number in two ways. bytes are
    decoded as UTF-8. An Enum counts by its value, an aware datetime by its time in UTC. A Decimal counts by its value:
    1, 1.0 and 1.00 are the key "1", and 1.50 is "1.5". Text counts as it is written: "1.50" is another key.

    Args:
        value: the value.
        name: the parameter to name in the error.

    Raises:
        MissingKey: the value is None or empty.
        InvalidArgument: the value is a bool, a float, a container or a naive datetime.
    """
    kind = type(value)
    if kind is str and value:
        return value  # type: ignore[return-value] # `kind is str` implies it, at half the cost of isinstance
    if kind is int:
        return _int_text(value, name)
    return _other_text(value, name)


def check_encodes(key: str, name: str) -> str:
    """Return the key. Raises InvalidArgument if it cannot be encoded as UTF-8."""
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(name, key, "holds half a surrogate pair", "Pass bytes, or repair the text") from None
    return key


def _int_text(value: Any, name: str) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # Python limits the conversion of an int to 4,300 digits
        raise InvalidArgument(
            name, f"int of {value.bit_length()} bits", "is too long for a key", "Use a hash of it"
        ) from None


def _other_text(value: object, name: str) -> str:
    if isinstance(value, Enum):
        return part_text(value.value, name)
    if value is None or (isinstance(value, (str, bytes)) and not value):
        raise MissingKey(name, value, "makes an empty key", _NO_NAME)
    if isinstance(value, bool):
        raise InvalidArgument(name, value, "is a bool, and two keys cannot tell messages apart", _KINDS)
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, name)
    raise InvalidArgument(name, value, f"is a {type(value).__qualname__}, which does not name anything", _fix(value))


def _fix(value: object) -> str:
    if isinstance(value, float):
        return "Floats differ by rounding: use an int, a Decimal or the text the number came from"
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return "Name one member of it, as in {event[id]}, or use a callable"
    return "Name an attribute of it, as in {order.id}. " + _KINDS


def _bytes_text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, value, "is not UTF-8", "Use a callable that returns value.hex()") from None


def _decimal_text(value: Decimal, name: str) -> str:
    if not value.is_finite():
        raise InvalidArgument(name, value, "is not a finite number", _KINDS)
    return decimal_text(value)


def _datetime_text(value: datetime, name: str) -> str:
    if value.utcoffset() is None:
        raise InvalidArgument(name, value, "is a naive datetime", "Give it a zone: value.replace(tzinfo=UTC)")
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidArgument(
            name, value, "has no such moment in UTC", "Pass a time well inside years 1 to 9999"
        ) from None


_WRITERS: list[tuple[type, Callable[[Any, str], str]]] = [
    (str, lambda value, _name: str.__str__(value)),
    (int, _int_text),
    (bytes, _bytes_text),
    (UUID, lambda value, _name: UUID.__str__(value)),
    (Decimal, _decimal_text),
    (datetime, _datetime_text),
    (date, lambda value, _name: value.isoformat()),
]
