"""A request to Redis as a value: built by pure functions, carried by a link, so that sync and async differ in one
word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from idemgate.core.codec.decoding import BROKEN, not_ours
from idemgate.errors import DecodeError, StoreError, UnexpectedData
from idemgate.lua import Script, script

__all__ = ["OF_ONE_KEY", "Arg", "Batch", "Call", "Each", "Elsewhere", "Moved", "Unfinished", "call", "text"]

T = TypeVar("T")
Arg = bytes | str | int
OF_ONE_KEY = (UnexpectedData, DecodeError)
"""Errors about what is stored under one key. All others of the store concern every call."""
Reply = list[Any]
"""What a script answers: a status word, the server's time in ms, then what its header says; bytes and ints only."""


class Moved(Exception):
    """The slot is closed, and nothing was done: a change of the topic, named by `by`, has taken it."""

    def __init__(self, by: bytes) -> None:
        super().__init__(by)
        self.by = by


class Unfinished(Exception):
    """A part was done, as much as one script call may. `rest` is to be asked, call by call in this order, and makes of
    their answers that to the whole."""

    def __init__(self, rest: Batch[Any]) -> None:
        super().__init__(rest)
        self.rest = rest


class Elsewhere(Protocol):
    """Where to ask when a slot has moved: first `ask`, then, knowing its answer, the calls of `there` one by one."""

    def ask(self) -> Call[Any]: ...
    def there(self, found: Any, by: bytes) -> Batch[Any]: ...


class Call(Generic[T]):
    """One script call: atomic, one round trip, safe to send again. `read` turns the reply into what the caller gets;
    `elsewhere` says what to do instead when the slot has moved; `framed` is the request in bytes, where who built it
    has done that (`core.framing`), else nothing."""

    __slots__ = ("args", "elsewhere", "framed", "keys", "read", "script")

    def __init__(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: Sequence[Arg],
        read: Callable[[Reply], T],
        elsewhere: Elsewhere | None = None,
        framed: bytes = b"",
    ) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.read = read
        self.elsewhere = elsewhere
        self.framed = framed

    def answer(self, reply: Reply) -> T:
        """What the caller gets for this reply. Raises UnexpectedData, Moved, Unfinished, or DecodeError for what we never
        wrote."""
        try:
            if reply[0] != b"foreign":
                return self.read(reply)
            problem: bytes = reply[2]
            if self.elsewhere is not None and problem.startswith(_CLOSED):
                raise Moved(problem[len(_CLOSED) :])
            raise self._foreign(problem)
        except BROKEN as error:
            raise not_ours(f"what {self.script.name} answers", error) from error

    def _foreign(self, problem: bytes) -> UnexpectedData:
        # A script of many keys begins the text with the one at fault; a script of one key need not.
        for key in self.keys:
            if problem.startswith(key + b" "):
                return UnexpectedData(text(key), text(problem[len(key) + 1 :]))
        return UnexpectedData(text(self.keys[0]), text(problem))


_CLOSED = b"closed "


class Batch(Generic[T]):
    """Calls that travel together (one script call each, not atomic as a whole), and how their answers become one."""

    __slots__ = ("calls", "join")

    def __init__(self, calls: Sequence[Call[Any]], join: Callable[[list[Any]], T]) -> None:
        self.calls = calls
        self.join = join


class Each(Call[Any], Generic[T]):
    """A call of a script that goes through many keys and answers each by itself: what `read` makes of a key's reply, or
    the StoreError about what is stored under it. Of its arguments the first are `common`, the others belong to the
    keys, as many to each. The script may leave the last keys to another call."""

    __slots__ = ("common",)

    def __init__(
        self, script: Script, keys: tuple[bytes, ...], args: Sequence[Arg], read: Callable[[Any], T], common: int
    ) -> None:
        super().__init__(script, keys, args, read)
        self.common = common

    def answer(self, reply: Any) -> list[T | StoreError]:
        """The answers in the order of the keys. Raises Unfinished, or DecodeError for what we never wrote."""
        try:
            replies = reply if len(self.keys) > 1 else [reply]
            found = [self._outcome(key, one) for key, one in zip(self.keys, replies, strict=False)]
            rest = self._rest(len(found))
        except BROKEN as error:
            raise not_ours(f"what {self.script.name} answers", error) from error
        if not rest:
            return found
        raise Unfinished(Batch(rest, lambda parts: [*found, *chain.from_iterable(parts)]))

    def _outcome(self, key: bytes, reply: Any) -> T | StoreError:
        try:
            if reply[0] != b"foreign":
                return self.read(reply)  # type: ignore[no-any-return]
            return UnexpectedData(text(key), text(reply[2]))
        except BROKEN as error:
            return not_ours(f"what {self.script.name} answers", error)

    def _rest(self, done: int) -> list[Each[T]]:
        """What is left behind so many keys: one call, which leaves as many as it has to."""
        if done == len(self.keys):
            return []
        if done == 0:
            raise ValueError("it tells of no key")
        each = (len(self.args) - self.common) // len(self.keys)
        args = [*self.args[: self.common], *self.args[self.common + done * each :]]
        return [Each(self.script, self.keys[done:], args, self.read, self.common)]


def call(name: str, keys: tuple[bytes, ...], args: Sequence[Arg], read: Callable[[Reply], T]) -> Call[T]:
    """A Call of the script of that name."""
    return Call(script(name), keys, args, read)


def text(value: bytes) -> str:
    """Bytes of ours as text."""
    return value.decode(errors="backslashreplace")
