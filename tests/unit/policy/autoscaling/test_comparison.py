"""The comparison with Knative's and Kubernetes' autoscalers, reduced to two shapes and one hour."""

from __future__ import annotations

from benchmarks.autoscaling import BASELINES, OURS, compare, find_worse


def test_autoscaler_is_nowhere_worse_than_the_others() -> None:
    rows = list(compare(3600, (120,), seed=1, shapes=("flash crowd", "square wave")))
    ours = [row for row in rows if row.scaler == OURS]
    assert not any(theirs.scaler in BASELINES for _, theirs in find_worse(rows))
    assert not any(row.below_minimum or row.unfounded_reversals for row in ours)
    for baseline in BASELINES:
        theirs = [row for row in rows if row.scaler == baseline]
        assert sum(row.replica_hours for row in ours) < sum(row.replica_hours for row in theirs)
