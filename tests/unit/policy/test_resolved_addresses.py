"""Addresses of a name while DNS answers omit some of them for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import ResolvedAddresses
from argosy.policy.resolved_addresses import EMPTY_ANSWER_GRACE_S, MISSING_GRACE_S

ANSWERS = st.lists(
    st.tuples(st.floats(0, EMPTY_ANSWER_GRACE_S), st.frozensets(st.sampled_from("abc"))),
    max_size=20,
)


@given(ANSWERS)
def test_recent_addresses_are_kept_and_unknown_ones_never_appear(
    answers: list[tuple[float, frozenset[str]]],
) -> None:
    addresses, now = ResolvedAddresses(), 0.0
    history: list[tuple[float, frozenset[str]]] = []
    for pause_s, answer in answers:
        now += pause_s
        history.append((now, answer))
        current = addresses.update(answer, now)
        recent = {
            address
            for at, addresses_then in history
            if now - at < MISSING_GRACE_S
            for address in addresses_then
        }
        assert (
            recent
            <= current
            <= {address for _, addresses_then in history for address in addresses_then}
        )


def test_address_is_removed_after_missing_grace() -> None:
    addresses = ResolvedAddresses()
    assert addresses.update({"a", "b"}, 0) == {"a", "b"}
    assert addresses.update({"a"}, 100) == {"a", "b"}  # first answer without it
    assert addresses.update({"a"}, 100 + MISSING_GRACE_S - 1) == {"a", "b"}
    assert addresses.update({"a"}, 100 + MISSING_GRACE_S) == {"a"}


def test_empty_answer_takes_effect_after_its_grace() -> None:
    addresses = ResolvedAddresses()
    addresses.update({"a", "b"}, 0)
    assert addresses.update((), 10) == {"a", "b"}
    assert addresses.update((), 10 + EMPTY_ANSWER_GRACE_S - 1) == {"a", "b"}
    assert addresses.update((), 10 + EMPTY_ANSWER_GRACE_S) == set()
    assert addresses.update({"c"}, 10 + EMPTY_ANSWER_GRACE_S) == {"c"}
