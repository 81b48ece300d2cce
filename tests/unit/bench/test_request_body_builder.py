"""Bodies: what is remembered of them is what comes again."""

from __future__ import annotations

import tracemalloc

import pytest

from argosy.bench import LengthDistribution, LoadSpec, Workload, build_plan
from argosy.bench.request_body_builder import RequestBodyBuilder
from argosy.bench.target import BenchTarget

LONG = 20_000


@pytest.mark.parametrize("vocabulary", [(), tuple(range(1000, 2000))])
def test_long_prompts_that_do_not_come_again_are_not_kept(vocabulary: tuple[int, ...]) -> None:
    target = BenchTarget(
        model="m",
        api="completions",
        ignore_eos=True,
        chunk_usage=True,
        temperature=0.0,
        extra_body={},
        vocabulary=vocabulary,
    )
    workload = Workload(
        input=LengthDistribution("fixed", LONG),
        output=LengthDistribution("fixed", 1),
        prefix_tokens=10,
    )
    plan = build_plan(workload, LoadSpec(concurrency=1, requests=20), 0)
    writer = RequestBodyBuilder(target)
    tracemalloc.start()
    try:
        sizes = [len(writer.build_body(session[0], [])) for session in plan.sessions]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(sizes) > LONG
    assert kept < max(sizes) * 3
