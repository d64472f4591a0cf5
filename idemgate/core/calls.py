"""Requests to Redis as values, and what they are made of: ids, the time, size limits, and their form on the wire.

Pure functions build a `Call`, and a link sends it. So the sync and the async code differ in one word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import lru_cache
from itertools import chain, count
from typing import Any, Generic, Protocol, Self, TypeVar

from idemgate.core.clock import Clock
from idemgate.core.codec.decoding import DECODE_ERRORS, decode_error
from idemgate.core.forks import run_in_child
from idemgate.errors import DecodeError, StoreError, UnexpectedData
from idemgate.lua import Script, script

__all__ = [
    "KEY_ERRORS",
    "MAX_CALL_BYTES",
    "MAX_ENTRIES",
    "Arg",
    "Batch",
    "Call",
    "Incomplete",
    "PerKeyCall",
    "PlainAnswers",
    "Plan",
    "Redirect",
    "SlotMoved",
    "bulk",
    "call",
    "constant",
    "head_with_keys",
    "new_id",
    "run_call",
    "run_calls",
    "run_plan",
    "run_plan_async",
    "split_batches",
    "stamp",
    "template",
    "text",
]

T = TypeVar("T")
Arg = bytes | str | int
KEY_ERRORS = (UnexpectedData, DecodeError)
"""Errors about the data of one key. All other store errors affect every call."""
Reply = list[Any]
"""A script's reply: a status word, the server's time in ms, then the fields its header lists. Bytes and ints only."""


class SlotMoved(Exception):
    """The slot is closed and the call did nothing. `by` names the change of the topic that closed it."""

    def __init__(self, by: bytes) -> None:
        super().__init__(by)
        self.by = by


class Incomplete(Exception):
    """A script call did only a part of its work because it reached its budget.

    `rest` holds the remaining calls, to be sent one by one in this order. Its `join` turns their answers into the
    answer to the whole.
    """

    def __init__(self, rest: Batch[Any]) -> None:
        super().__init__(rest)
        self.rest = rest


class Redirect(Protocol):
    """The way to the slots that now hold the data of a moved slot."""

    def lookup(self) -> Call[Any]:
        """Return the call that reads the topic's current layout."""
        ...

    def resolve(self, found: Any, by: bytes) -> Batch[Any]:
        """Return the calls to send one by one instead, given the answer to `lookup`."""
        ...


class Call(Generic[T]):
    """One script call: atomic, one round trip, safe to send again.

    Attributes:
        script: the script to run.
        keys: its KEYS.
        args: its ARGV.
        read: turns the reply into the caller's answer.
        redirect: used when the slot has moved; None for a script without slots.
        framed: the whole request in RESP if the builder has packed it (`template`), else empty.
    """

    __slots__ = ("args", "framed", "keys", "read", "redirect", "script")
    plain: bytes = b""
    """Plain commands in RESP that may do the work of the script, where a server has them. Empty for most calls."""
    pair = False
    """True if `plain` are two commands, so that two replies come. One if False."""
    undo_plain: bytes = b""
    """The request that takes back the first command of a pair whose second one was refused."""

    def __init__(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: Sequence[Arg],
        read: Callable[[Reply], T],
        redirect: Redirect | None = None,
        framed: bytes = b"",
    ) -> None:
        self.script: Script = script
        self.keys: tuple[bytes, ...] = keys
        self.args: Sequence[Arg] = args
        self.read: Callable[[Reply], T] = read
        self.redirect: Redirect | None = redirect
        self.framed: bytes = framed

    def answer(self, reply: Reply) -> T:
        """Return the caller's answer for a script reply.

        Raises:
            UnexpectedData: a key holds data that idemgate did not write.
            SlotMoved: the slot is closed.
            Incomplete: the script did only a part.
            DecodeError: the reply has an unknown form.
        """
        try:
            if reply[0] != b"foreign":
                return self.read(reply)
            problem: bytes = reply[2]
            if self.redirect is not None and problem.startswith(_CLOSED):
                raise SlotMoved(problem[len(_CLOSED) :])
            raise self._unexpected_data(problem)
        except DECODE_ERRORS as error:
            raise decode_error(f"a reply of {self.script.name}", error) from error

    def answer_plain(self, reply: Any, asked: float) -> T | None:  # noqa: ARG002 - for calls with `plain`
        """Return the caller's answer for the reply to `plain`, or for a pair of replies. None: ask the script.

        `asked` is a value of `monotonic()` from before `plain` was sent.
        """
        return None

    def _unexpected_data(self, problem: bytes) -> UnexpectedData:
        # A script of many keys starts the text with the key at fault; a script of one key need not.
        for key in self.keys:
            if problem.startswith(key + b" "):
                return UnexpectedData(text(key), text(problem[len(key) + 1 :]))
        return UnexpectedData(text(self.keys[0]), text(problem))


_CLOSED = b"closed "


class Batch(Generic[T]):
    """Calls sent together, and `join`, which turns their answers into one.

    Each call is atomic; the batch is not.
    """

    __slots__ = ("calls", "join")

    def __init__(self, calls: Sequence[Call[Any]], join: Callable[[list[Any]], T]) -> None:
        self.calls: Sequence[Call[Any]] = calls
        self.join: Callable[[list[Any]], T] = join


class PerKeyCall(Call[Any], Generic[T]):
    """A call of a script that answers each of its keys separately.

    The answer for a key is what `read` returns for its reply, or the StoreError about its data. The first `common`
    arguments belong to all keys. The others belong to one key each, the same number for every key. A script may leave
    the last keys to another call. `plain_terms` is what the plain commands of its keys share. None: there are none.
    """

    __slots__ = ("common",)
    plain_terms: Any = None

    def __init__(
        self, script: Script, keys: tuple[bytes, ...], args: Sequence[Arg], read: Callable[[Any], T], common: int
    ) -> None:
        super().__init__(script, keys, args, read)
        self.common: int = common

    def answer(self, reply: Any) -> list[T | StoreError]:
        """Return the answers in the order of the keys.

        Raises:
            Incomplete: the script left the last keys to another call.
            DecodeError: the reply has an unknown form.
        """
        try:
            replies = reply if len(self.keys) > 1 else [reply]
            answers = [self._answer_of(key, entry) for key, entry in zip(self.keys, replies, strict=False)]
            rest = self._remaining_calls(len(answers))
        except DECODE_ERRORS as error:
            raise decode_error(f"a reply of {self.script.name}", error) from error
        if not rest:
            return answers
        raise Incomplete(Batch(rest, lambda parts: [*answers, *chain.from_iterable(parts)]))

    def frame_plain(self) -> bytes:
        """Return the plain commands of all keys: one for each, or two with `pair`."""
        return b""

    def read_plain(self, replies: Sequence[Any], asked: float) -> PlainAnswers[T]:
        """Return the answers in the replies to `frame_plain`. `asked` as for `answer_plain`."""
        raise NotImplementedError

    def _answer_of(self, key: bytes, reply: Any) -> T | StoreError:
        try:
            if reply[0] != b"foreign":
                return self.read(reply)  # type: ignore[no-any-return]
            return UnexpectedData(text(key), text(reply[2]))
        except DECODE_ERRORS as error:
            return decode_error(f"a reply of {self.script.name}", error)

    def _remaining_calls(self, done: int) -> list[PerKeyCall[T]]:
        """Return one call for the keys after the first `done`, or no call if all are done."""
        if done == len(self.keys):
            return []
        if done == 0:
            raise ValueError("the reply covers no key")
        return [self.only(range(done, len(self.keys)))]

    def only(self, places: Sequence[int]) -> Self:
        """Return the call of the keys at these places, by its script."""
        per_key = (len(self.args) - self.common) // len(self.keys)
        starts = [self.common + place * per_key for place in places]
        args = [*self.args[: self.common], *(word for start in starts for word in self.args[start : start + per_key])]
        return type(self)(self.script, tuple([self.keys[place] for place in places]), args, self.read, self.common)


PlainAnswers = tuple[list[T | None], list[Call[Any]]]
"""An answer for each key, or None where the script must give it; and the calls to send before that script."""


def call(name: str, keys: tuple[bytes, ...], args: Sequence[Arg], read: Callable[[Reply], T]) -> Call[T]:
    """Return a call of the script with that name."""
    return Call(script(name), keys, args, read)


def text(value: bytes) -> str:
    """Return stored bytes as text; invalid UTF-8 is shown as escapes."""
    return value.decode(errors="backslashreplace")


# -- ids and the time -------------------------------------------------------------------------------------------------


_counter = count()


class _Prefix:
    """The random part of this process's ids."""

    __slots__ = ("text",)

    def __init__(self) -> None:
        self.draw()

    def draw(self) -> None:
        self.text = os.urandom(10)


_prefix = _Prefix()


def new_id() -> bytes:
    """Return a new id of a request or an owner, unique without a round trip.

    It has 16 bytes: ten random ones of this process, then a counter. A forked child draws a new random part. It takes
    0.4 us, and a uuid4 2 to 5 us.
    """
    return _prefix.text + next(_counter).to_bytes(6, "big")


PROCESS_BYTES = 8
"""The bytes of an id that tell its process from others (`topics/scripts/lib/slot/history.lua`)."""


def process_bytes() -> bytes:
    """Return what all ids of this process begin with."""
    return _prefix.text[:PROCESS_BYTES]


run_in_child(_prefix.draw)


def stamp(clock: Clock | None) -> bytes:
    """Return ARGV[1] of every script: the test clock's time, or empty for the server's time."""
    return b"" if clock is None else b"%d" % clock.microseconds()


# -- size limits of one script call -----------------------------------------------------------------------------------
# The server is blocked while a script runs.

MAX_ENTRIES = 100
"""The most entries of one script call: records, triggers or deliveries."""
MAX_CALL_BYTES = 131_072
"""Most bytes of messages, or one message: Lua makes a text of it up to seven times, each costs the server 1 ms a MB. As
in `lua/lib/now.lua`."""


def split_batches(entries: list[T], size_of: Callable[[T], int], most: int = MAX_ENTRIES) -> list[list[T]]:
    """Split `entries` into batches for one script call each, in their order.

    Args:
        entries: the entries to split.
        size_of: returns the bytes of an entry.
        most: the maximum number of entries in a batch.
    """
    sizes = list(map(size_of, entries))
    if sum(sizes) <= MAX_CALL_BYTES:
        return [entries[start : start + most] for start in range(0, len(entries), most)]
    batches, room = list[list[T]](), 0
    for entry, size in zip(entries, sizes, strict=True):
        if not batches or len(batches[-1]) == most or size > room:
            batches.append([])
            room = MAX_CALL_BYTES
        batches[-1].append(entry)
        room -= size
    return batches


# -- requests in RESP -------------------------------------------------------------------------------------------------
# One `%` over bytes costs an eighth of encoding word by word, so the constant parts of frequent calls are encoded once.
# The link encodes calls that are not framed.


def bulk(word: bytes) -> bytes:
    """Return one word of a request as a RESP bulk string."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


def template(script: Script, *words: bytes) -> bytes:
    """Return a format for `%` that makes an EVALSHA request with one key. `words` are formats of the framed arguments.

    The format takes the length of the key and the key first. Pass constant words through `constant`.
    """
    start = b"*%d\r\n$7\r\nEVALSHA\r\n%b$1\r\n1\r\n$%%d\r\n%%b\r\n" % (4 + len(words), bulk(script.sha))
    return start + b"".join(words)


def constant(word: bytes) -> bytes:
    """Return a word as a part of a template."""
    return bulk(word).replace(b"%", b"%%")


@lru_cache(1024)
def head_with_keys(sha: bytes, keys: tuple[bytes, ...], args: int) -> bytes:
    """Return the start of an EVALSHA request with these keys and `args` arguments, up to the first argument."""
    words = (b"EVALSHA", sha, b"%d" % len(keys), *keys)
    return b"*%d\r\n%b" % (len(words) + args, b"".join(map(bulk, words)))


# -- plans ------------------------------------------------------------------------------------------------------------

Plan = Generator[Batch[list[Any]] | float, Any, T]
"""Several requests of which the later ones depend on the answers to the earlier ones.

A plan is a generator: it yields batches, receives their answers, and returns its result. A number is a pause in
seconds. `run_plan` and `run_plan_async` drive it.
"""
_MAX_CALLS = 256
"""Maximum calls in one batch of a plan."""


def run_call(request: Call[T]) -> Plan[T]:
    """Run one call in a plan, and return its answer."""
    answers: list[T] = yield Batch([request], list)
    return answers[0]


def run_calls(calls: Iterable[Call[Any]]) -> Plan[list[Any]]:
    """Run independent calls in a plan, and return their answers."""
    answers: list[Any] = []
    waiting = list(calls)
    for start in range(0, len(waiting), _MAX_CALLS):
        answers += yield Batch(waiting[start : start + _MAX_CALLS], list)
    return answers


def run_plan(plan: Generator[Any, Any, T], run: Callable[[Any], Any]) -> T:
    """Run a generator of requests and pauses to its end and return its result. Blocks."""
    try:
        request = next(plan)
        while True:
            if isinstance(request, float):
                time.sleep(request)
                request = next(plan)
            else:
                request = plan.send(run(request))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        plan.close()  # else its `finally` would wait until the traceback is gone
        raise


async def run_plan_async(plan: Generator[Any, Any, T], run: Callable[[Any], Awaitable[Any]]) -> T:
    """Run a generator of requests and pauses to its end and return its result. Awaits each of them."""
    from asyncio import sleep  # blocking programs need no import of asyncio

    try:
        request = next(plan)
        while True:
            if isinstance(request, float):
                await sleep(request)
                request = next(plan)
            else:
                request = plan.send(await run(request))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        plan.close()
        raise
