"""Which addresses a name has, whatever its answers lack for a while."""

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
def test_what_an_answer_had_lately_is_there_and_nothing_that_none_had(
    answers: list[tuple[float, frozenset[str]]],
) -> None:
    addresses, now = ResolvedAddresses(), 0.0
    told: list[tuple[float, frozenset[str]]] = []
    for after, found in answers:
        now += after
        told.append((now, found))
        there = addresses.update(found, now)
        lately = {one for at, had in told if now - at < MISSING_GRACE_S for one in had}
        assert lately <= there <= {one for _, had in told for one in had}


def test_an_address_goes_once_it_has_been_lacked_for_long() -> None:
    addresses = ResolvedAddresses()
    assert addresses.update({"a", "b"}, 0) == {"a", "b"}
    assert addresses.update({"a"}, 100) == {"a", "b"}  # nobody has looked meanwhile
    assert addresses.update({"a"}, 100 + MISSING_GRACE_S - 1) == {"a", "b"}
    assert addresses.update({"a"}, 100 + MISSING_GRACE_S) == {"a"}


def test_one_that_comes_back_in_between_stays() -> None:
    addresses = ResolvedAddresses()
    for now in range(0, 1000, 5):
        there = addresses.update({"a"} if now % 10 else {"a", "b"}, float(now))
        assert there == {"a", "b"}


def test_an_empty_answer_is_believed_later() -> None:
    addresses = ResolvedAddresses()
    addresses.update({"a", "b"}, 0)
    assert addresses.update((), 10) == {"a", "b"}
    assert addresses.update((), 10 + EMPTY_ANSWER_GRACE_S - 1) == {"a", "b"}
    assert addresses.update((), 10 + EMPTY_ANSWER_GRACE_S) == set()
    assert addresses.update({"c"}, 10 + EMPTY_ANSWER_GRACE_S) == {"c"}
