"""Feature flags: which variant each request gets, shares that grow, and rules that are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.traffic import FLAG_VARIABLES, FeatureFlag, FlagError, FlagRules

EMPTY = dict.fromkeys(FLAG_VARIABLES, "")


def make_rules(targeting: Any, name: str = "f", **fields: Any) -> FlagRules:  # noqa: ANN401 - any JSON
    flag = {"variants": {"on": True, "off": False, "old": False}, "defaultVariant": "off"}
    return FlagRules(name, msgspec.convert(flag | {"targeting": targeting} | fields, FeatureFlag))


ACME = {"in": [{"var": "project"}, ["acme/web", "acme/app"]]}


@pytest.mark.parametrize(
    ("targeting", "request_fields", "variant"),
    [
        ({}, {}, "off"),
        ({"if": [ACME, "on"]}, {"project": "acme/web"}, "on"),
        ({"if": [ACME, "on"]}, {"project": "zeta/web"}, "off"),
        ({"if": [ACME, "on", "old"]}, {"project": "zeta/web"}, "old"),
        ({"if": [{"!": [ACME]}, "on"]}, {"project": "zeta/web"}, "on"),
        ({"if": [{"and": [ACME, {"==": [{"var": "tier"}, "free"]}]}, "on"]}, {"tier": "free"}, "off"),
        ({"if": [{"or": [ACME, {"!=": [{"var": "tier"}, "free"]}]}, "on"]}, {"tier": "premium"}, "on"),
        ({"if": [{"starts_with": [{"var": "user"}, "a"]}, "on"]}, {"user": "ab"}, "on"),
        ({"if": [{"ends_with": [{"cat": [{"var": "user"}, "!"]}, "b!"]}, "on"]}, {"user": "ab"}, "on"),
        ({"if": [{"in": ["b", {"var": "user"}]}, "on"]}, {"user": "abc"}, "on"),
        ({"if": [{"in": [1, {"var": "user"}]}, "on"]}, {"user": "1"}, "off"),
        ({"fractional": [["on", 1], ["off", 0]]}, {"targetingKey": "u"}, "on"),
        ({"fractional": [["on", 1]]}, {}, "off"),
        ({"fractional": [{"var": "project_id"}, ["on"], ["on"]]}, {"project_id": "p"}, "on"),
    ],
)  # fmt: skip
def test_rules_select_the_variant(
    targeting: dict[str, Any], request_fields: dict[str, str], variant: str
) -> None:
    rules = make_rules(targeting)
    assert rules.select(EMPTY | request_fields).variant == variant
    disabled = make_rules(targeting, state="DISABLED")
    assert disabled.select(EMPTY | request_fields) == ("off", "disabled")


@given(st.text(min_size=1), st.floats(0, 100), st.floats(0, 100), st.booleans())
def test_growing_share_keeps_those_it_had(
    key: str, one: float, other: float, is_first: bool
) -> None:
    def has(share: float) -> bool:
        shares = [["on", share], ["off", 100 - share]]
        rules = make_rules({"fractional": shares if is_first else shares[::-1]})
        return rules.select(EMPTY | {"targetingKey": key}).variant == "on"

    low, high = sorted((one, other))
    assert has(high) or not has(low)
    assert has(100)
    assert not has(0)


def test_shares_are_exact_and_differ_between_flags() -> None:
    keys = [f"user-{number}" for number in range(4000)]
    found = [
        {
            key
            for key in keys
            if make_rules({"fractional": [["on", 20], ["off", 80]]}, name)
            .select(EMPTY | {"targetingKey": key})
            .variant
            == "on"
        }
        for name in ("a", "b")
    ]
    assert [len(each) / 4000 for each in found] == pytest.approx([0.2, 0.2], abs=0.02)
    assert len(found[0] & found[1]) / 4000 == pytest.approx(0.04, abs=0.015)


@pytest.mark.parametrize(
    ("targeting", "problem"),
    [
        ({"if": [True, "on"], "or": []}, "one key"),
        ({"loop": [1]}, "'loop' is unknown"),
        ({"if": [{"var": "password"}, "on"]}, "no variable 'password'"),
        ({"if": [{"var": {"var": "user"}}, "on"]}, "no variable"),
        ({"if": [{"==": [1]}, "on"]}, "another number of arguments"),
        ({"if": []}, "another number of arguments"),
        ({"if": [True, "blue"]}, "no variant 'blue'. Use one of on, off, old"),
        ({"if": [True, {"if": [True, "on", "blue"]}]}, "no variant 'blue'"),
        ({"fractional": [["blue", 5]]}, "no variant 'blue'"),
        ({"fractional": [["on", -5]]}, "pairs of a variant"),
        ({"fractional": [["on", True]]}, "pairs of a variant"),
        ({"fractional": [["on", 0]]}, "a weight above 0"),
        ({"fractional": [{"var": "user"}]}, "a weight above 0"),
        ({"if": [{"in": ["x", ["y"] * 300]}, "on"]}, "more than 200 values"),
    ],
)
def test_wrong_rules_are_refused(targeting: dict[str, Any], problem: str) -> None:
    with pytest.raises(FlagError, match=problem):
        make_rules(targeting)
    nested: Any = "on"
    for _ in range(30):
        nested = {"!": [nested]}
    with pytest.raises(FlagError, match="nested"):
        make_rules({"if": [nested, "on"]})
    with pytest.raises(FlagError, match="no variant 'blue'"):
        make_rules({}, defaultVariant="blue")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["on", "user", "targetingKey", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["if", "==", "in", "and", "or", "!", "var", "cat", "fractional", "starts_with"]
            ),
            inner,
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=12,
)


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_accepted_rules_always_select_a_variant(targeting: dict[str, Any]) -> None:
    try:
        rules = make_rules(targeting)
    except FlagError:
        return
    assert rules.select(EMPTY | {"targetingKey": "k"}).variant in {"on", "off", "old"}
