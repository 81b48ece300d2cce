"""Request bodies: long prompts that occur once are not cached."""

from __future__ import annotations

import tracemalloc

import pytest

from argosy.bench import LengthDistribution, LoadSpec, Workload, build_plan
from argosy.bench.request_body_builder import RequestBodyBuilder
from argosy.bench.target import BenchTarget

INPUT_TOKENS = 20_000


@pytest.mark.parametrize("vocabulary", [(), tuple(range(1000, 2000))])
def test_long_unique_prompts_are_not_cached(vocabulary: tuple[int, ...]) -> None:
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
        input=LengthDistribution("fixed", INPUT_TOKENS),
        output=LengthDistribution("fixed", 1),
        prefix_tokens=10,
    )
    plan = build_plan(workload, LoadSpec(concurrency=1, requests=8), 0)
    builder = RequestBodyBuilder(target)
    tracemalloc.start()
    try:
        body_sizes = [len(builder.build_body(session[0], [])) for session in plan.sessions]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(body_sizes) > INPUT_TOKENS
    assert kept_bytes < max(body_sizes) * 3
