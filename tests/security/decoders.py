"""Everything that reads stored bytes, each as a function of bytes that gives a value or raises NotDecodable."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from idemgate.core.codec import Codec
from idemgate.core.merging import Merge, merge_of
from idemgate.core.messages import Delivery, Message, forwarded, letter_of
from idemgate.core.policy import differing, from_stored
from idemgate.gate import Gate

__all__ = ["DECODERS"]

_CODEC = Codec(max_bytes=65_536)
_LOCAL = Gate("redis://nowhere").topic("t").policy
_MERGES = {name: merge_of(name) for name in ("last", "append", "union", "sum", "max")}  # type: ignore[arg-type]
_MERGES["fields"] = merge_of({"a": "append", "b": "sum", "*": "last"})


def _message(data: bytes, merge: Merge) -> None:
    message = Message(data, merge, _CODEC)
    made = Delivery[object]("t", 0, b"k", 1, 1, message)
    _all_of(made, message)


def _all_of(*things: object) -> None:
    """Reads every property, since what is read late must be refused as well."""
    for thing in things:
        for name, found in vars(type(thing)).items():
            if isinstance(found, property):
                getattr(thing, name)
        repr(thing)


def _letter(data: bytes) -> None:
    letter = letter_of(0, b"7", data, _MERGES["last"], _CODEC)
    _all_of(letter, letter.message)


def _policy(data: bytes) -> None:
    policy = from_stored(data, _LOCAL)
    policy.for_scripts()
    policy.limits(0)
    differing(data, _LOCAL.stored())


def _forwarded(data: bytes) -> None:
    _all_of(forwarded("t", data, _MERGES["last"], _CODEC))


DECODERS: Mapping[str, Callable[[bytes], object]] = {
    "codec": _CODEC.decode,
    **{f"message, {name}": (lambda data, merge=merge: _message(data, merge)) for name, merge in _MERGES.items()},
    "letter": _letter,
    "forwarded": _forwarded,
    "policy": _policy,
}
