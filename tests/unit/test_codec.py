"""The codec: what goes in comes out, equal and of the same types, or is refused before it is written."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import fallback

from idemgate.core.codec import Codec, canonical, digest, packing
from idemgate.core.codec.packing import Ext, ValueEncoder, from_ext, looks_plain, measure
from idemgate.errors import DecodeError, InvalidArgument
from tests.for_each import for_each

CODEC = Codec()
NAIVE = datetime(2024, 1, 1)  # noqa: DTZ001
ZONES = st.builds(timezone, st.integers(-86_399, 86_399).map(lambda seconds: timedelta(seconds=seconds)))
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70),
    2**70) | st.floats() | TEXTS | st.binary()
    | st.datetimes(timezones=ZONES) | st.dates() | st.timedeltas() | st.decimals() | st.uuids()
)  # fmt: skip
HASHABLES = st.recursive(
    SCALARS.filter(
        lambda value: (
            not (isinstance(value, float) and math.isnan(value)) and not (isinstance(value, Decimal) and value.is_nan())
        )
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLES, inner, max_size=5)
        | st.sets(HASHABLES, max_size=4)
        | st.frozensets(HASHABLES, max_size=4)
    ),
    max_leaves=25,
)


def exact(value: Any) -> Any:
    """A value that equals another only if it is the same down to types, signs of zero, NaN and offsets."""
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(exact(item)) for item in value)
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, float):
        return float, "nan" if math.isnan(value) else struct.pack(">d", value)
    if isinstance(value, datetime):  # fold is gone, and said by the offset
        return datetime, str(value.replace(tzinfo=None)), value.utcoffset()
    return type(value), hex(value) if isinstance(value, int) else str(value)


def nested(levels: int, wrap: Any = lambda inner: [inner]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


# -- round trips ---------------------------------------------------------------------------------------------


@given(VALUES)
def test_what_is_accepted_comes_back_the_same(value: Any) -> None:
    assert exact(CODEC.decode(CODEC.encode(value))) == exact(value)


@given(st.recursive(st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXTS | st.none() | st.binary(),
                    lambda inner: st.lists(inner) | st.dictionaries(TEXTS | st.integers(0, 2**64 - 1),
                    inner), max_leaves=60))  # fmt: skip
def test_the_short_way_and_the_long_way_write_the_same(value: Any) -> None:
    """Given plain values, When both encode them, Then the bytes agree."""
    assert CODEC.encode(value) == b"\x01" + ValueEncoder("payload", 64).encode(value)


@for_each(
    "value",
    [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**5000, 0.0, -0.0, math.inf, math.nan,
    5e-324,
     b"", "", (), [], {}, set(), frozenset(), ((),), [()], "\x00", "\U0010ffff", "a" * 31, "a" * 32,
     "a" * 256, "a" * 65_536,
     b"a" * 256, b"a" * 65_536, list(range(15)), list(range(16)), list(range(65_536)),
     {i: i for i in range(16)},
     {i: i for i in range(30_000)}, {1: "a", "1": "b"}, {None: 1, True: 2, 2.5: 3, b"k": 4, (1, 2): 5},
     {frozenset({1}): {2}},
     Decimal("sNaN123"), Decimal("-Infinity"), Decimal("1.10"), Decimal("1E+999999"), UUID(int=0),
     UUID(int=2**128 - 1),
     date.min, date.max, datetime.min.replace(tzinfo=UTC),
     datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
     datetime(1890, 1, 1, tzinfo=timezone(timedelta(minutes=53, seconds=28))), timedelta.min, timedelta.max,
     19.99, [19.99] * 64, "ÄäÖöÜüĀāĂăΑαΔδ" * 20, "中文" * 1000],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) else f"int{value.bit_length()}",
)  # fmt: skip
def test_edges_come_back_the_same(value: Any) -> None:
    back = CODEC.decode(CODEC.encode(value))
    assert exact(back) == exact(value)


def test_a_datetime_keeps_its_offset_but_not_the_name_of_its_zone() -> None:
    summer = datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = CODEC.decode(CODEC.encode(summer))
    assert (back, back.utcoffset()) == (summer, timedelta(hours=2))
    assert not isinstance(back.tzinfo, ZoneInfo)


# -- refused, not changed ------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Size(IntEnum):
    SMALL = 1


class Kind(StrEnum):
    A = "a"


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the untyped kind


@dataclass(frozen=True)
class Item:
    name: str
    colour: Colour = Colour.RED
    tags: tuple[str, ...] = ()
    made: str = field(default="here", init=False)


@for_each(
    "value",
    [Colour.RED, Size.SMALL, Kind.A, Text("a"), Pair(1, 2), bytearray(b"a"), memoryview(b"a"),
    msgpack.ExtType(1, b"2024"),
     msgpack.Timestamp(1), OrderedDict(a=1), defaultdict(list), Counter("a"), time(12), NAIVE, object(),
     iter([]),
     datetime(2024, 1, 1, tzinfo=timezone(timedelta(microseconds=1))), Item, int, len, 1j, range(3),
     Exception("x"), "\ud800", ...],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@for_each(
    "around",
    [lambda x: x, lambda x: [1, x], lambda x: {"a": [x]}, lambda x: (x,), lambda x: [19.99, Decimal(1), x],
    lambda x: [[]] * 99 + [x]],
    ids=["bare", "list", "dict", "tuple", "mixed", "large"],
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused(value: Any, around: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        CODEC.encode(around(value), "result")
    assert refused.value.name.startswith("result")
    with pytest.raises(InvalidArgument):
        canonical(around(value))


def test_the_error_names_the_place_and_the_fix() -> None:
    with pytest.raises(InvalidArgument) as refused:
        CODEC.encode({"lines": [1, {"at": NAIVE}]})
    assert refused.value.name == "payload['lines'][1]['at']"
    assert "naive" in refused.value.problem
    assert "tzinfo=UTC" in refused.value.fix


@pytest.mark.parametrize("value", [{Item("a"): 1}, {Item("a")}, frozenset({Item("a")}), {(Item("a"),): 1}])
def test_a_model_that_would_come_back_unhashable_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="hashed"):
        CODEC.encode(value)


def test_members_that_would_become_one_are_refused() -> None:
    @dataclass
    class Counts:
        by: dict[Any, int]
        seen: Any = None

    with pytest.raises(InvalidArgument, match="become one"):
        CODEC.encode(Counts({Colour.RED: 1, 1: 2}))
    with pytest.raises(InvalidArgument, match="become one"):
        CODEC.encode(Counts({}, seen={Colour.RED, 1}))


def test_a_model_is_stored_as_its_fields_and_enums_in_it_by_value() -> None:
    stored = CODEC.decode(CODEC.encode([Item("a", tags=("x",))]))
    assert stored == [{"name": "a", "colour": 1, "tags": ("x",), "made": "here"}]


def test_a_model_whose_fields_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Half:
        a: int = field(init=False)

    with pytest.raises(InvalidArgument, match="cannot be read"):
        CODEC.encode(Half())
    monkeypatch.setattr(packing, "_PACKER", fallback.Packer)  # it calls __repr__, which fails, too
    with pytest.raises(InvalidArgument, match="cannot be read"):
        CODEC.encode(Half())


# -- limits (F52) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "levels"), [(lambda x: [x], 64), (lambda x: {"k": x}, 64), (lambda x: (x,), 32),
    (lambda x: frozenset([x]), 32)]
)  # fmt: skip
def test_the_depth_limit_is_the_same_going_in_and_coming_out(wrap: Any, levels: int) -> None:
    # Given the deepest value allowed
    deepest = nested(levels, wrap)
    assert CODEC.decode(CODEC.encode(deepest)) == deepest
    # When it is one level deeper, Then both ends refuse it
    deeper = wrap(deepest)
    with pytest.raises(InvalidArgument, match="deeper"):
        CODEC.encode(deeper)
    with pytest.raises(DecodeError, match="deeper"):
        CODEC.decode(Codec(max_depth=128).encode(deeper))
    with pytest.raises(InvalidArgument, match="deeper"):
        canonical(deeper)


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(InvalidArgument, match="cycle"):
        CODEC.encode(cycle)
    with pytest.raises(InvalidArgument, match="cycle"):
        canonical({"a": cycle})
    # Also of models
    node = make_dataclass("Node", ["next"])(None)
    node.next = node
    with pytest.raises(InvalidArgument, match="cycle"):
        CODEC.encode(node)


@pytest.mark.parametrize(
    "many", [lambda n: [0] * n, lambda n: dict.fromkeys(range(n // 2)), lambda n: [(0,)] * (n // 3)]
)
def test_the_item_limit_is_the_same_going_in_and_coming_out(many: Any) -> None:
    small, large = Codec(max_items=1_000), Codec()
    assert small.decode(small.encode(many(900))) == many(900)
    with pytest.raises(InvalidArgument, match="more than 1,000"):
        small.encode(many(1_100))
    with pytest.raises(DecodeError):
        small.decode(large.encode(many(1_100)))


def test_the_size_limit_counts_every_stored_byte() -> None:
    codec = Codec(max_bytes=100)
    fits = codec.encode("a" * 97)
    assert len(fits) == 100
    assert codec.decode(fits) == "a" * 97
    with pytest.raises(InvalidArgument, match="101 bytes; the limit is 100"):
        codec.encode("a" * 98)
    with pytest.raises(DecodeError, match="101 bytes"):
        codec.decode(fits + b"a")


@given(VALUES, st.integers(1, 40), st.integers(1, 6), st.integers(1, 12))
def test_what_a_codec_accepts_it_can_decode_whatever_its_limits(value: Any, size: int, depth: int, items: int) -> None:
    codec = Codec(max_bytes=size * 8, max_depth=depth, max_items=items)
    try:
        data = codec.encode(value)
    except InvalidArgument:
        return
    assert exact(codec.decode(data)) == exact(value)


@pytest.mark.parametrize("depth", [0, 129, -1])
def test_depths_that_could_not_be_unpacked_are_refused(depth: int) -> None:
    with pytest.raises(InvalidArgument, match="max_depth"):
        Codec(max_depth=depth)


# -- foreign and hostile bytes -------------------------------------------------------------------------------


@for_each(
    "data",
    [b"", b"\x00\x01", b"\x02\x01", b"\x80\x04K\x01.", b"{}", b"\x01", b"\x01\xc1", b"\x01\x01\x01",
    b"\x01\x91", b"\x01\xa1\xff",
     b"\x01\x81\x90\x01", b"\x01\xd6\xff\x00\x00\x00\x01", b"\x01\xc7\x00\x0a", b"\x01\xd4\x7fa",
     b"\x01\xd4\x05a", b"\x01\xd4\x04x",
     b"\x01\xd5\x0712", b"\x01\xd4\x07\x01", b"\x01\xd5\x07\x91\x91", b"\x01\xd4\x07", b"\x01\xc7",
     b"\x01\xd9", b"\x01\xdc\x00",
     b"\x01\xc7\x0a\x012024-01-01", b"\x01\xc7\x09\x03" + b"\x7f" * 9, b"\x01\xc7\x02\x08\x91\x90",
     b"\x01\xd9\x05abc"],
)  # fmt: skip
def test_what_we_never_write_is_not_decodable(data: bytes) -> None:
    with pytest.raises(DecodeError) as refused:
        CODEC.decode(data)
    assert refused.value.why


BOMBS = {
    "claims": b"\xdd\x00\x03\xff\xff" * 50_000,
    "claims in small": b"\xdc\x0f\xff" * 1_300,
    "one claim": b"\xdd\xff\xff\xff\xff",
    "map claim": b"\xdf\x7f\xff\xff\xff",
    "text claim": b"\xdb\xff\xff\xff\xff",
    "binary claim": b"\xc6\xff\xff\xff\xff",
    "ext claim": b"\xc9\xff\xff\xff\xff\x07",
    "deep": b"\x91" * 200_000,
    "deep pairs": b"\x81\x01" * 100_000,
    "deep tuples": b"\xc9\x00\x01\x00\x00\x07\x91" * 30_000,
    "ext in ext": b"".join(b"\xc8" + struct.pack(">H", 50_000 - 4 * i) + b"\x07" for i in range(12_000)),
    "wide": b"\xdd\x00\x03\xf0\x00" + b"\x90" * 0x3F000,
    "wide and deep": (b"\xdc\x07\xd0" + b"\x90" * 1_999) * 60 + b"\x90",
}


@for_each("bomb", BOMBS)
def test_a_bomb_is_refused_before_memory_is_taken(bomb: str) -> None:
    data = b"\x01" + BOMBS[bomb]
    assert len(data) <= CODEC.max_bytes
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            CODEC.decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


@given(st.binary(max_size=80))
def test_random_bytes_decode_to_something_storable_or_not_at_all(junk: bytes) -> None:
    try:
        value = CODEC.decode(b"\x01" + junk)
    except DecodeError:
        return
    again = CODEC.encode(value)
    assert exact(CODEC.decode(again)) == exact(value)


@given(VALUES, st.data())
def test_damaged_bytes_never_raise_anything_else(value: Any, data: st.DataObject) -> None:
    stored = bytearray(CODEC.encode(value))
    stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for damaged in (bytes(stored), bytes(stored[:cut]), bytes(stored) + b"\x00"):
        try:
            CODEC.decode(damaged)
        except DecodeError as refused:
            assert refused.why  # noqa: PT017 - either outcome is right, another exception is not


@given(VALUES)
def test_every_cut_and_every_extra_byte_is_noticed(value: Any) -> None:
    stored = CODEC.encode(value)
    for cut in range(len(stored)):
        with pytest.raises(DecodeError):
            CODEC.decode(stored[:cut])
    with pytest.raises(DecodeError):
        CODEC.decode(stored + b"\xc0")


@given(VALUES)
def test_looking_at_bytes_agrees_with_measuring_them(value: Any) -> None:
    """looks_plain may be wrong in one direction only."""
    body = CODEC.encode(value)[1:]
    if looks_plain(body, 64):
        assert measure(body, 64, 100_000)


@given(st.lists(st.floats() | st.integers(-(2**63), 2**64 - 1) | TEXTS, max_size=8))
def test_numbers_and_texts_are_known_to_be_plain_without_measuring(value: list[Any]) -> None:
    assert looks_plain(CODEC.encode(value)[1:], 10_000)


# -- canonical -----------------------------------------------------------------------------------------------


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(item) for key, item in reversed(value.items())}
    if isinstance(value, (list, tuple)):
        return type(value)(shuffled(item) for item in value)
    return value


@given(VALUES)
def test_order_in_dicts_and_sets_does_not_count(value: Any) -> None:
    assert canonical(shuffled(value)) == canonical(value)
    assert digest(CODEC.decode(CODEC.encode(value))) == digest(value)


@given(VALUES, VALUES)
def test_canonical_bytes_are_equal_only_for_equal_values(one: Any, other: Any) -> None:
    if canonical(one) == canonical(other):
        assert exact(shuffled(one)) == exact(shuffled(other)) or one == other


DISTINCT = [1, 1.0, True, "1", b"1", Decimal(1), [1], (1,), {1}, frozenset({1}), {1: 1}, [[1]], [1, 1],
    None, 0, 0.0, -0.0, False, "",
            b"", [], (), {}, set(), {"a": 1, "b": 2}, [["a", 1], ["b", 2]], Decimal("1.5"), 2**64, str(2**64),
            date(2024, 1, 1), datetime(2024, 1, 1, tzinfo=UTC), "2024-01-01", timedelta(1), 86_400,
            {"1": 1}, {1.0: 1}, {True: 1},
            UUID(int=1), datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))]  # fmt: skip


def test_values_that_differ_in_type_only_differ() -> None:
    assert len({canonical(value) for value in DISTINCT}) == len(DISTINCT)
    assert len({digest(value) for value in DISTINCT}) == len(DISTINCT)


EQUAL = [
    ["1", "1.0", "1.00", "01", "+1", "10E-1"], ["0", "-0", "0.00", "0E+5"], ["1.5", "1.50", "15E-1"],
    ["100", "1E+2", "1.00E2"], ["-2.5", "-2.50"], ["1E+100", "10E+99"], ["1E-100", "10E-101"],
]  # fmt: skip


@for_each("texts", EQUAL, ids=lambda texts: texts[0])
def test_equal_decimals_have_one_digest_and_come_back_as_they_were(texts: list[str]) -> None:
    values = [Decimal(text) for text in texts]
    assert len({digest(value) for value in values}) == 1
    assert len({digest({"amount": [value]}) for value in values}) == 1
    for value in values:
        assert str(CODEC.decode(CODEC.encode(value))) == str(value)


def test_nan_is_nan_whatever_its_bits() -> None:
    negative = struct.unpack(">d", b"\xff\xf8\x00\x00\x00\x00\x00\x01")[0]
    assert canonical([negative, {"a": negative}]) == canonical([math.nan, {"a": math.nan}])


def test_a_model_has_the_digest_of_its_class_and_its_fields() -> None:
    assert digest(Item("a")) == digest(Item("a"))
    assert digest(Item("a")) != digest({"made": "here", "tags": (), "colour": 1, "name": "a"})
    other = make_dataclass("Item", [each.name for each in fields(Item)])
    other.__module__ = "elsewhere"  # since Python 3.12 it is that of the caller
    assert canonical(other("a", Colour.RED, (), "here")) != canonical(Item("a"))


def test_stored_digests_stay_what_they_are() -> None:
    """Fingerprints are compared with those an older version stored: these bytes must never change."""
    value = {"b": [1, (2.5, None)], "a": {Decimal("1.5"), "x"}, 3: datetime(2024, 1, 1, tzinfo=UTC)}
    assert (
        canonical(value).hex()
        == "8303c71901323032342d30312d30315430303a30303a30302b30303a3030a161c7090892a178c70304312e35"
        "a1629201c70b0792cb4004000000000000c0"
    )
    assert len(digest(value)) == 16
    assert digest(value, 32).hex() == "13a363a56779aa763b8688f52fec94bc6f0f11e39f6f14b0ffe9cc05c988720e"


def test_the_order_of_texts_is_that_of_texts_and_of_other_keys_that_of_their_bytes() -> None:
    texts = canonical({"b": 1, "aa": 2})
    assert texts.index(b"aa") < texts.index(b"\xa1b")
    assert canonical({"b": 1, 2: 1}) == canonical({2: 1, "b": 1})


def test_what_msgpack_holds_as_an_integer_is_stored_as_one() -> None:
    for value in (-(2**63), 2**64 - 1):
        assert CODEC.encode(value).endswith(msgpack.packb(value))
    for value in (-(2**63) - 1, 2**64):
        assert CODEC.decode(CODEC.encode(value)) == value
    # And what it cannot hold by its bytes, no more than it needs
    for value, size in ((2**64, 9), (2**71 - 1, 9), (2**71, 10), (-(2**71), 10)):
        assert len(CODEC.encode(value)) == 1 + len(msgpack.packb(msgpack.ExtType(Ext.BIG_INT, bytes(size))))


def test_a_dict_comes_back_in_its_order_whatever_is_in_it() -> None:
    for value in ({"b": 1, "a": 2}, {"b": (1,), "a": {"d": 1, "c": (2,)}}):
        assert repr(CODEC.decode(CODEC.encode(value))) == repr(value)
    # And a model as its fields in theirs
    made = make_dataclass("Made", ["b", "a"])(1, {"d": 1, "c": 2})
    assert repr(CODEC.decode(CODEC.encode(made))) == "{'b': 1, 'a': {'d': 1, 'c': 2}}"


@for_each("depth", [1, 2, 63, 64, 65, 128])
def test_no_codec_reads_what_nests_deeper_than_it_writes(depth: int) -> None:
    deep = b"\x01" + b"\x91" * depth + b"\x01"
    assert Codec(max_depth=depth).encode(Codec(max_depth=depth).decode(deep)) == deep
    if depth > 1:
        with pytest.raises(DecodeError, match=f"nests deeper than {depth - 1} levels"):
            Codec(max_depth=depth - 1).decode(deep)


@pytest.mark.parametrize("code", [0, 12, 127, -1])
def test_an_ext_id_that_is_none_of_ours_is_named(code: int) -> None:
    with pytest.raises(ValueError, match=f"ext id {code} is unknown"):
        from_ext(code, b"")
