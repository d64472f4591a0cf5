"""key= and fingerprint=: checked when decorating, never empty, injective, the same however it is called."""

from __future__ import annotations

import functools
import inspect
import re
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
import wrapt
from hypothesis import assume, given
from hypothesis import strategies as st

from idemgate.core.codec import digest
from idemgate.core.key_template import compile_fingerprint, compile_key
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


class Thing:
    """Anything with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def on(event: Any, /, order: Any = "o", *rest: Any, flag: Any = "f", **more: Any) -> None: ...


def pair(a: Any, b: Any = "b") -> None: ...


def key(spec: Any, *args: Any, func: Any = pair, instance: object = None, **kwargs: Any) -> Any:
    return compile_key(spec, func).of(instance, args, kwargs)


# -- templates -----------------------------------------------------------------------------------------------


@for_each(
    ("template", "value", "expected"),
    [
        ("{a}", "x", "x"),
        ("{a[id]}", {"id": "evt_1"}, "evt_1"),
        ("{a.id}", Thing(id=7), "7"),
        ("{a[items][0]}", {"items": ["first"]}, "first"),
        ("{a.order[lines][1].sku}", Thing(order={"lines": [0, Thing(sku="s")]}), "s"),
        ("{a[some key]}", {"some key": 1}, "1"),
        ("{a[x.y:z]}", {"x.y:z": 1}, "1"),
        ("order-{a}!", "x:y%", "order-x:y%!"),
        ("{{{a}}}", "x", "{x}"),
        ("{a}:{b}", "x", "x:b"),
        ("{a}:{b}", "x:y", "x%3Ay:b"),
        ("{a}:{b}", "100%", "100%25:b"),
        ("{a} / {b}", "x y/z:", "x%20y/z: / b"),
        ("{a}→{b}", "x→y", "x%E2%86%92y→b"),
        ("{a}", "é\n\0{}", "é\n\0{}"),
    ],
)
def test_a_template_reads_the_arguments(template: str, value: Any, expected: str) -> None:
    assert key(template, value) == expected


@for_each(
    ("template", "says"),
    [
        ("", "no field"),
        ("constant", "no field"),
        ("{{a}}", "no field"),
        ("{}", "not a field"),
        ("{0}", "not a field"),
        ("{a", "not a template"),
        ("a}", "not a template"),
        ("{c}", "{c} is not a parameter"),
        ("{A}", "{A} is not a parameter"),
        ("{a[id]}:{c.d}", "{c.d} is not a parameter"),
        ("{a!r}", "format"),
        ("{a!s}", "format"),
        ("{a:>10}", "format"),
        ("{a:{b}}", "format"),
        ("{a.__class__}", "public"),
        ("{a._x}", "public"),
        ("{a.b c}", "public"),
        ("{a.}", "not a field"),
        ("{a[]}", "not a field"),
        ("{a[x}", "not a template"),
        ("{a[x]y}", "not a field"),
        ("{a..b}", "not a field"),
        ("{ a}", "not a field"),
        ("{a}{b}", "run into"),
        ("{a}x{b}", "run into"),
        ("{a}%{b}", "run into"),
        ("{a}2{b}", "run into"),
        (7, "neither"),
        (b"{a}", "neither"),
        (["a"], "neither"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_decorating(template: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)) as refused:
        compile_key(template, pair)
    assert refused.value.name == "key"
    assert refused.value.value == template


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"Its parameters: event, order, rest, flag$"):
        compile_key("{evnt}", lambda event, /, order, *rest, flag: None)
    with pytest.raises(InvalidArgument, match=r"Its parameters: none$"):
        compile_key("{evnt}", lambda: None)


@for_each(
    ("template", "value", "says"),
    [
        ("{a}", None, "empty key"),
        ("{a}", "", "empty key"),
        ("{a}", b"", "empty key"),
        ("{a[id]}", {"id": None}, "empty key"),
        ("prefix-{a}", "", "empty key"),
        ("{a}:{b}", "", "empty key"),
        ("{a}", True, "bool"),
        ("{a}", 1.5, "Floats differ by rounding"),
        ("{a}", float("nan"), "Floats differ by rounding"),
        ("{a}", Decimal("NaN"), "finite"),
        ("{a}", {"id": 1}, "{event[id]}"),
        ("{a}", [1], "{event[id]}"),
        ("{a}", (1,), "{event[id]}"),
        ("{a}", Thing(), "{order.id}"),
        ("{a}", datetime(2024, 1, 1), "naive"),  # noqa: DTZ001
        ("{a}", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "UTC"),
        ("{a}", b"\xff", "UTF-8"),
        ("{a}", "\ud800", "surrogate"),
        ("{a.id}", Thing(id="\ud800"), "surrogate"),
        ("x-{a[id]}", {"id": "\ud800"}, "surrogate"),
        ("{a}:{b}", "x\udfff", "surrogate"),
        pytest.param("{a}", 10**5000, "too long", id="huge"),
        ("{a[id]}", {}, "KeyError"),
        ("{a[0]}", [], "IndexError"),
        ("{a[id]}", [], "TypeError"),
        ("{a[id]}", 7, "TypeError"),
        ("{a.id}", {"id": 1}, "AttributeError"),
        ("{a[id][x]}", {"id": None}, "TypeError"),
    ],
)
def test_a_value_that_names_nothing_is_refused_at_the_call(template: str, value: Any, says: str) -> None:
    spec = compile_key(template, pair)
    with pytest.raises(InvalidArgument, match=re.escape(says)) as refused:
        spec.of(None, (value,), {})
    field = re.findall(r"\{a[^}]*\}", template)[0]
    assert refused.value.name == f"key field {field}"


class Colour(Enum):
    RED = "red"
    NONE = None


class Size(IntEnum):
    SMALL = 1


class Kind(StrEnum):
    A = "a"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"


class LoudId(UUID):
    def __str__(self) -> str:
        return "LOUD"


@for_each(
    ("value", "expected"),
    [
        (0, "0"),
        (-7, "-7"),
        (2**70, str(2**70)),
        (b"evt_1", "evt_1"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.5"),
        (Decimal("1.00"), "1"),
        (Decimal("-0.0"), "0"),
        (Decimal("1E+5"), "100000"),
        (Decimal("1E-3"), "0.001"),
        (Decimal("1E+999999"), "1E+999999"),
        (Decimal("-12E-999"), "-12E-999"),
        (Colour.RED, "red"),
        (Size.SMALL, "1"),
        (Kind.A, "a"),
        (Loud("quiet"), "quiet"),
        (LoudId(int=1), "00000000-0000-0000-0000-000000000001"),
        (date(2024, 1, 2), "2024-01-02"),
        (datetime(2024, 1, 2, 1, tzinfo=timezone(timedelta(hours=2))), "2024-01-01T23:00:00+00:00"),
    ],
)
def test_what_may_be_part_of_a_key(value: Any, expected: str) -> None:
    assert key("{a}", value) == expected
    assert type(key("{a}", value)) is str


@given(st.decimals(allow_nan=False, allow_infinity=False), st.decimals(allow_nan=False, allow_infinity=False))
def test_decimals_are_one_key_exactly_if_they_are_equal(one: Decimal, other: Decimal) -> None:
    assert (key("{a}", one) == key("{a}", other)) == (one == other)
    for zeros in range(4):
        longer = Decimal(f"{one:f}" + ("." if "." not in f"{one:f}" else "") + "0" * zeros)
        assert key("{a}", longer) == key("{a}", one)
        assert Decimal(key("{a}", one)) == one


def test_a_decimal_is_the_key_of_the_equal_whole_number() -> None:
    assert key("{a}", Decimal("7.00")) == key("{a}", 7) == key("{a}", "7")


def test_an_enum_is_judged_by_its_value() -> None:
    with pytest.raises(InvalidArgument, match="empty key"):
        key("{a}", Colour.NONE)


@given(
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    st.sampled_from(["{a}:{b}", "{a}-{b}", "x{a} :: {b}y", "{a}ab:cd{b}", "{a}→{b}", "{a}%:{b}", "{a}3A:{b}"]),
)
def test_different_values_never_meet_in_one_key(a: str, b: str, c: str, d: str, template: str) -> None:
    """F51: no pair of values looks like another pair."""
    assume((a, b) != (c, d))
    assert key(template, a, b) != key(template, c, d)


PIECES = st.text(":%3A-x", min_size=1, max_size=4)


@given(PIECES, PIECES, PIECES, PIECES, st.sampled_from(["{a}:{b}", "{a}%3A:{b}", "{a}3A-{b}", "{a}x:x{b}"]))
def test_nor_do_values_made_of_separators_and_escapes(a: str, b: str, c: str, d: str, template: str) -> None:
    assert (key(template, a, b) == key(template, c, d)) == ((a, b) == (c, d))


@given(TEXTS)
def test_with_one_field_the_value_stands_as_it_is(text: str) -> None:
    assert key("{a}", text) == text
    assert key("<{a}>", text) == f"<{text}>"


# -- where arguments are found -------------------------------------------------------------------------------


@given(st.data())
def test_arguments_are_found_wherever_python_would_bind_them(data: st.DataObject) -> None:
    """Given any call the function accepts, When a field is looked up, Then it is what inspect's bind says."""
    count = data.draw(st.integers(1, 5))
    args = tuple(f"p{at}" for at in range(count))
    names = data.draw(st.sets(st.sampled_from(["order", "flag", "extra", "event"])))
    kwargs = {name: f"k-{name}" for name in names if not (name == "order" and count > 1)}
    bound = inspect.signature(on).bind(*args, **kwargs)
    bound.apply_defaults()
    # event in kwargs is one of **more: the parameter is positional-only
    expected = {name: bound.arguments[name] for name in ("event", "order", "flag")}
    for name, value in expected.items():
        assert compile_key(f"{{{name}}}", on).of(None, args, kwargs) == value
    if len(args) > 2:
        assert compile_key("{rest[0]}", on).of(None, args, kwargs) == "p2"
    if "extra" in kwargs:
        assert compile_key("{extra}", on).of(None, args, kwargs) == compile_key("{more[extra]}", on).of(
            None, args, kwargs
        )
    everything = digest(dict(bound.arguments)).hex()
    assert compile_key(None, on).of(None, args, kwargs) == everything


@pytest.mark.parametrize("template", ["{a}", "{a[id]}:{b}"])
def test_a_call_the_function_would_refuse_is_refused_as_python_does(template: str) -> None:
    with pytest.raises(TypeError, match="'a'"):
        key(template)
    with pytest.raises(TypeError, match="'extra'"):
        key("{extra}", "x", func=on)


class Shop:
    id = "shop-1"
    kind = "shops"

    def pay(self, order: str, amount: int = 5) -> None: ...

    @classmethod
    def open(cls, order: str, amount: int = 5) -> None: ...

    @staticmethod
    def check(order: str, amount: int = 5) -> None: ...


@pytest.mark.parametrize("spec", ["{order}:{amount}", lambda *args, **kw: f"{args[-1]}:5"])
def test_methods_have_the_same_key_with_self_in_args_or_apart(spec: Any) -> None:
    compiled = compile_key(spec, Shop.__dict__["pay"])
    shop = Shop()
    assert compiled.of(shop, ("o1",), {}) == compiled.of(None, (shop, "o1"), {})


def test_a_method_needs_a_key_because_its_object_is_in_no_argument() -> None:
    with pytest.raises(InvalidArgument, match=r'Shop\.pay is a method.* key="\{self\.id\}'):
        compile_key(None, Shop.pay)
    with pytest.raises(InvalidArgument, match=r"Shop\.pay is a method"):
        compile_key(None, Shop().pay)
    # A function that becomes a method later is found at its first call
    compiled = compile_key(None, lambda this, order: None)
    with pytest.raises(InvalidArgument, match="is a method"):
        compiled.of(Shop(), ("o1",), {})
    # A staticmethod has no object
    of_none = compile_key(None, Shop.__dict__["check"])
    assert of_none.of(None, ("o1",), {}) == of_none.of(None, (), {"order": "o1"}) != of_none.of(None, ("o2",), {})


class Credit:
    def __init__(self, account: str) -> None:
        self.account = account

    def __call__(self, amount: int) -> None: ...


@for_each(
    ("func", "says"),
    [
        (Credit("ann"), r"Credit is an object with __call__.*key=lambda amount"),
        (functools.partial(pair, "ann"), r"pair is a partial, and the arguments that it holds do not count.*Decorate"),
        (functools.partial(functools.partial(pair, "ann"), b=1), "pair is a partial"),
        (functools.partial(Shop().pay, amount=1), "is a partial"),
        (functools.partial(Credit("ann"), amount=1), "is a partial"),
        (functools.lru_cache(Shop().pay), "is a method"),
        (functools.wraps(Shop().pay)(lambda amount: None), "is a method"),
        (functools.wraps(Shop.open)(lambda: None), "is a classmethod"),
        (functools.update_wrapper(functools.partial(print), functools.lru_cache(Credit("ann"))), "is an object"),
        (Shop.__dict__["open"], r"Shop\.open is a classmethod.*key=lambda cls"),
        (Shop.open, "is a classmethod"),
        (Shop.__dict__["open"].__func__, "is a classmethod"),
    ],
)
def test_what_holds_more_than_its_arguments_needs_a_key(func: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        compile_key(None, func)
    assert compile_key(lambda *args, **named: "k", func).of(None, (1,), {}) == "k"


def test_a_function_that_holds_nothing_else_needs_no_key() -> None:
    named = functools.partial(pair, b="2")  # a keyword is a default, which counts
    assert len({compile_key(None, one).of(None, (1,), {}) for one in (named, functools.partial(pair, b="3"))}) == 2
    cached = functools.cache(pair)
    assert compile_key(None, cached).of(None, (1,), {}) == compile_key(None, pair).of(None, (1,), {})
    # Of which class a classmethod is, may be known at its first call only
    with pytest.raises(InvalidArgument, match="is a classmethod"):
        compile_key(None, lambda this, order: None).of(Shop, ("o1",), {})


def test_self_and_cls_can_be_named() -> None:
    shop = Shop()
    assert compile_key("{self.id}:{order}", Shop.pay).of(shop, ("o",), {}) == "shop-1:o"
    assert compile_key("{self.id}:{order}", Shop.pay).of(None, (shop, "o"), {}) == "shop-1:o"
    assert compile_key("{cls.kind}:{order}", Shop.__dict__["open"]).of(Shop, ("o",), {}) == "shops:o"
    assert compile_key(lambda self, order: self.id + order, Shop.pay).of(shop, ("o",), {}) == "shop-1o"


def test_a_bound_method_brings_its_instance() -> None:
    shop = Shop()
    assert compile_key("{self.id}:{order}", shop.pay).of(None, ("o",), {}) == "shop-1:o"
    assert compile_key("{order}", shop.pay).of(shop, ("o",), {}) == "o"


def test_self_is_an_argument_like_any_other_outside_of_a_class() -> None:
    def work(self: str, other: int = 1) -> None: ...

    compiled = compile_key(None, work)
    assert compiled.of(None, ("a",), {}) != compiled.of(None, ("b",), {})


def keyed(spec: Any) -> Any:
    """As the decorators do it: wrapt in between."""

    def decorate(func: Any) -> Any:
        compiled = compile_key(spec, func)

        def call(wrapped: Any, instance: object, args: Any, kwargs: Any) -> Any:
            return compiled.of(instance, args, kwargs)

        return wrapt.FunctionWrapper(func, call)

    return decorate


class Decorated:
    @keyed("{order}")
    def method(self, order: str) -> None: ...

    @keyed("{order}")
    @classmethod
    def outside(cls, order: str) -> None: ...

    @classmethod
    @keyed("{order}")
    def inside(cls, order: str) -> None: ...

    @keyed("{order}")
    @staticmethod
    def static_outside(order: str) -> None: ...

    @staticmethod
    @keyed("{order}")
    def static_inside(order: str) -> None: ...

    @keyed("{order}")
    async def later(self, order: str) -> None: ...


@for_each("name", ["method", "outside", "inside", "static_outside", "static_inside", "later"])
def test_every_kind_of_method_works_under_wrapt(name: str) -> None:
    instance = Decorated()
    assert getattr(instance, name)("o1") == getattr(instance, name)(order="o1") == "o1"
    if name in ("method", "later"):
        assert getattr(Decorated, name)(instance, "o1") == "o1"
    else:
        assert getattr(Decorated, name)("o1") == "o1"


def test_functions_partials_bound_methods_and_callable_objects_work_under_wrapt() -> None:
    class Work:
        def __call__(self, order: str) -> None: ...

    assert keyed("{order}")(lambda order: None)("o") == "o"
    assert keyed("{order}")(functools.partial(lambda shop, order: None, "s"))("o") == "o"
    assert keyed("{order}")(functools.partial(lambda order, shop: None, shop="s"))("o") == "o"
    assert keyed("{self.id}{{}}:{order}")(Shop().pay)("o") == "shop-1{}:o"
    assert keyed("{order}")(Work())("o") == "o"


def test_a_function_without_a_signature_needs_a_callable() -> None:
    with pytest.raises(InvalidArgument, match="Pass a callable"):
        compile_key("{a}", dict.fromkeys.__self__)
    assert compile_key(lambda *args: args[0], dict).of(None, ("k",), {}) == "k"


# -- callables and all arguments -----------------------------------------------------------------------------


@for_each("value", ["x", b"x", b"\xff\x00", 0, -1, 10**4000])
def test_a_callable_may_return_text_bytes_or_an_int(value: Any) -> None:
    assert key(lambda a, b="b": value, 1) is value


def test_a_callable_may_return_what_a_field_may_hold() -> None:
    assert key(lambda a: a, UUID(int=1)) == str(UUID(int=1))
    assert key(lambda a: a, Size.SMALL) == "1"


@for_each("value", [None, "", b"", True, 1.5, {}, [], ("a",), object(), "\ud800"])
def test_anything_else_from_a_callable_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^key callable"):
        key(lambda a: value, 1)


def test_a_coroutine_function_is_no_key() -> None:
    async def later(a: str) -> str:
        return a

    with pytest.raises(InvalidArgument, match="coroutine"):
        compile_key(later, pair)
    with pytest.raises(InvalidArgument, match="coroutine"):
        compile_fingerprint(later, pair)


def test_without_a_key_every_argument_counts() -> None:
    same = {key(None, 1, 2), key(None, 1, b=2), key(None, a=1, b=2)}
    assert len(same) == 1
    assert re.fullmatch("[0-9a-f]{32}", same.pop())
    assert key(None, 1) == key(None, 1, "b")
    assert len({key(None, 1), key(None, "1"), key(None, 1.0), key(None, True), key(None, [1]), key(None, (1,))}) == 6


def test_an_argument_that_cannot_be_hashed_names_itself_and_the_way_out() -> None:
    with pytest.raises(InvalidArgument, match="key=") as refused:
        key(None, {"x": object()})
    assert refused.value.name == "arguments['a']['x']"


# -- fingerprints --------------------------------------------------------------------------------------------


def fingerprint(spec: Any, *args: Any, func: Any = pair, **kwargs: Any) -> bytes:
    compiled = compile_fingerprint(spec, func)
    return b"" if compiled is None else compiled.of(None, args, kwargs)


def test_a_fingerprint_is_of_the_named_arguments_only() -> None:
    assert fingerprint(None, 1, 2) == b""
    assert len(fingerprint(["a"], 1)) == 16
    assert fingerprint(["a"], 1, 2) == fingerprint(("a",), 1, 3) == fingerprint("a", 1, 4)
    assert fingerprint(["a"], 1) != fingerprint(["a"], 2)
    assert fingerprint(["a", "b"], 1, 2) == fingerprint(["b", "a"], 1, 2) != fingerprint(["a", "b"], 2, 1)
    assert fingerprint(["a[x]"], {"x": 1, "y": 2}) == fingerprint(["a[x]"], {"x": 1, "y": 3})
    assert fingerprint(["a"], {"x": 1, "y": 2}) == fingerprint(["a"], {"y": 2, "x": 1})


def test_a_fingerprint_may_be_computed() -> None:
    assert fingerprint(lambda a, b: a["x"], {"x": 1}, 2) == digest(1)
    assert fingerprint(lambda a: None, 1) == digest(None)  # nothing in it is still a fingerprint
    assert compile_fingerprint(lambda self, order: self.id, Shop.pay).of(Shop(), ("o",), {}) == digest("shop-1")


@for_each("spec", [["c"], "c", ["a", "c"], [], "", [1], [None], ["a.__dict__"], ["{a}"]])
def test_a_fingerprint_of_unknown_names_is_refused_when_decorating(spec: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compile_fingerprint(spec, pair)
    assert refused.value.name == "fingerprint"


def test_a_fingerprint_that_cannot_be_taken_names_the_argument() -> None:
    with pytest.raises(InvalidArgument) as refused:
        fingerprint(["a"], {"x": object()})
    assert refused.value.name == "fingerprint['a']['x']"
    with pytest.raises(InvalidArgument, match="KeyError"):
        fingerprint(["a[x]"], {})
    with pytest.raises(InvalidArgument, match=r"^fingerprint="):
        fingerprint(lambda a: object(), 1)


def test_an_argument_that_must_be_named_is_none_of_those_that_are_not() -> None:
    def pay(order: str, *rest: str, amount: int = 5) -> None: ...

    assert compile_key("{amount}", pay).of(None, ("o", "p", "q"), {"amount": 7}) == "7"
    assert compile_key("{amount}", pay).of(None, ("o", "p", "q"), {}) == "5"


@for_each("compile_spec", [compile_key, compile_fingerprint])
@for_each(
    ("spec", "fits"),
    [
        pytest.param(lambda order, amount: order, True, id="same names"),
        pytest.param(lambda a, b, c=1: a, True, id="other names"),
        pytest.param(lambda *given, **named: given, True, id="any"),
        pytest.param(lambda *, amount, order: order, True, id="by name"),
        pytest.param(lambda a, /, *, amount: a, True, id="mixed"),
        pytest.param(lambda order: order, False, id="too few"),
        pytest.param(lambda a, b, c: a, True, id="with an optional argument"),
        pytest.param(lambda a, b, c, d: a, False, id="too many"),
        pytest.param(lambda *, order, price: order, False, id="unknown name"),
        pytest.param(lambda: "k", False, id="none"),
    ],
)
def test_a_callable_that_fits_no_call_is_refused_when_decorating(compile_spec: Any, spec: Any, fits: bool) -> None:
    def pay(order: str, amount: int, note: str = "", *rest: str, **more: str) -> None: ...

    def with_session(order: str) -> None: ...

    functools.update_wrapper(with_session, pay)
    assert compile_spec(spec, with_session)  # its signature is that of another function
    if fits:
        assert compile_spec(spec, pay)
        return
    with pytest.raises(InvalidArgument, match="does not take the arguments of the function"):
        compile_spec(spec, pay)
