"""Parametrization that covers all pairs of values in the default tier, and the full product in the exhaustive tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Case = tuple[int, ...]
"""Index of the value of each axis."""


def pairwise(*, indirect: Sequence[str] = (), **axes: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize a test with the product of some axes, of which the default tier runs a pairwise subset.

    The subset contains every pair of values of two axes at least once. All other cases are marked exhaustive.
    Cases with a value that is a `pytest.param` marked exhaustive are never in the subset.

    Args:
        indirect: Names of axes that are fixtures.
        axes: Values of each parameter. A `pytest.param` with one value gives a value its id and marks.
    """
    columns = [[_as_param(value) for value in values] for values in axes.values()]
    default = [
        [index for index, param in enumerate(column) if not param.marks] for column in columns
    ]
    selected = select_pairwise(list(product(*default)))
    cases = []
    for case in product(*(range(len(column)) for column in columns)):
        params = [column[index] for column, index in zip(columns, case, strict=True)]
        values = [param.values[0] for param in params]
        marks = () if case in selected else pytest.mark.exhaustive
        cases.append(pytest.param(*values, id="-".join(str(p.id) for p in params), marks=marks))
    return pytest.mark.parametrize(tuple(axes), cases, indirect=list(indirect))


def select_pairwise(cases: list[Case]) -> set[Case]:
    """Select cases greedily until they contain every pair of values that the product `cases` contains."""
    pairs = {case: {*_pairs(case)} for case in cases}
    uncovered = set[Any]().union(*pairs.values())
    selected = set[Case]()
    while uncovered:
        best = max(cases, key=lambda case: len(pairs[case] & uncovered))
        selected.add(best)
        uncovered -= pairs[best]
    return selected


def _pairs(case: Case) -> Iterable[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(case), 2)


def _as_param(value: object) -> ParameterSet:
    """Return a value with an id."""
    param = value if isinstance(value, ParameterSet) else pytest.param(value)
    return pytest.param(*param.values, id=param.id or str(param.values[0]), marks=param.marks)
