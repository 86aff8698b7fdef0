"""For any value at all: equal text exactly for equal type and content, and the value comes back from its text."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tuning.spec import Key, LaunchConfig, canonical_json, encode_value, natural_order

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)
# Small pools make equal values, and values equal in Python alone, likely.
alike = st.recursive(
    st.sampled_from([None, True, False, 1, 0, 1.0, 0.0, -0.0, "1", "True", "None", b"1", ""]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.lists(inner, max_size=2).map(tuple)),
    max_leaves=4,
)
names = st.text(alphabet="ABMN_=|,\"'", min_size=1, max_size=3)


def decode(data: Any) -> Any:
    """The inverse that the product itself never needs: it shows that nothing was lost."""
    if not isinstance(data, dict):
        return data
    [(kind, inner)] = data.items()
    match kind:
        case "float":
            return float(inner)
        case "bytes":
            return bytes.fromhex(inner)
        case "tuple":
            return tuple(decode(item) for item in inner)
        case "list":
            return [decode(item) for item in inner]
        case "dict":
            return {decode(json.loads(key)): decode(value) for key, value in inner}
    raise AssertionError(f"unknown kind {kind}")


def typed(value: Any) -> Any:
    """``value`` as something that compares by type and content; floats by their digits and sign."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(typed(item) for item in value)
    if isinstance(value, dict):
        return "dict", frozenset((typed(key), typed(item)) for key, item in value.items())
    return type(value).__name__, repr(value)


@given(values)
def test_a_value_comes_back_from_its_text(value: object) -> None:
    assert typed(decode(json.loads(encode_value(value)))) == typed(value)


@given(values)
def test_a_text_is_canonical_json(value: object) -> None:
    text = encode_value(value)
    assert canonical_json(json.loads(text)) == text
    assert text.isascii()


@given(alike, alike)
def test_texts_are_equal_exactly_for_equal_types_and_contents(one: object, two: object) -> None:
    assert (encode_value(one) == encode_value(two)) == (typed(one) == typed(two))


@given(st.lists(values, max_size=6))
def test_natural_order_is_total(items: list[object]) -> None:
    texts = [encode_value(item) for item in items]
    backwards = texts[::-1]
    for listing in (texts, backwards):
        listing.sort(key=natural_order)
    assert texts == backwards


@given(st.dictionaries(names, values, max_size=4), st.dictionaries(names, names, max_size=3), st.randoms())
def test_key_text_ignores_order_and_survives_json(
    values: dict[str, object], dtypes: dict[str, str], random: Any
) -> None:
    key = Key.of(values, dtypes, call_order=tuple(dtypes))
    shuffled = Key.of(dict(random.sample(list(values.items()), len(values))), dtypes)
    assert shuffled.text == key.text
    back = Key.from_json(json.loads(canonical_json(key.to_json())))
    assert (back, back.call_order, back.text) == (key, key.call_order, key.text)


@given(st.dictionaries(names, alike, max_size=3), st.dictionaries(names, alike, max_size=3))
def test_key_texts_are_equal_exactly_for_equal_keys(one: dict[str, object], two: dict[str, object]) -> None:
    same = typed(one) == typed(two)
    assert (Key.of(one).text == Key.of(two).text) == same
    assert (Key.of(one).values_text == Key.of(two).values_text) == same


launch_fields = st.fixed_dictionaries(
    {"num_warps": st.sampled_from([1, 4]), "num_stages": st.sampled_from([1, 3])},
    optional={
        "num_ctas": st.sampled_from([1, 2]),
        "maxnreg": st.sampled_from([None, 128]),
        "ir_override": st.sampled_from([None, "k.ttgir"]),
    },
)
configs = st.builds(
    lambda kwargs, extra, core: LaunchConfig.build(kwargs, extra=extra, **core),
    st.dictionaries(names, alike, max_size=2),
    st.dictionaries(names, alike, max_size=1),
    launch_fields,
)


@given(configs)
def test_config_survives_json(config: LaunchConfig) -> None:
    back = LaunchConfig.from_json(json.loads(config.text))
    assert back == config
    assert back.text == config.text


@given(configs, configs)
def test_texts_and_order_tell_configs_apart(one: LaunchConfig, two: LaunchConfig) -> None:
    assert (one == two) == (one.text == two.text) == (one.order == two.order)
    assert (one.order < two.order) + (two.order < one.order) + (one == two) == 1
