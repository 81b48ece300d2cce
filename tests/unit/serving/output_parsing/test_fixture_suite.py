"""The public fixture suite `canitoolcall`: every well-formed output is parsed exactly, in every chunking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from canitoolcall.checks import run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, group_sizes
from canitoolcall.results import Observation, Status
from tests.support.tool_call_fixtures import FAMILIES, FIXTURES, parse, pieces_of

from argosy.engine.serving.output_parsing import Piece

CUT = "The call has streamed before the output is cut. The finish reason is then `length`."
STREAMED = (
    "The call has streamed before its arguments turn out to be malformed. It gets no end event."
)
SECOND_CUT = "The second call has streamed before it is cut. The finish reason is then `length`."
CONTRADICTION = "`sglang-text-before-call` of the same family keeps the space before the call, and this drops it."
EXCEPTIONS = {
    "deepseek/v3-truncated-mid-arguments": CUT,
    "deepseek/v31-truncated-mid-arguments": CUT,
    "deepseek/v32-truncated-mid-arguments": CUT,
    "deepseek/v32-truncated-second-parallel-call": SECOND_CUT,
    "deepseek/v4-truncated-mid-arguments": CUT,
    "deepseek/v4-truncated-second-parallel-call": SECOND_CUT,
    "deepseek/v41-truncated-mid-arguments": CUT,
    "deepseek/v41-truncated-second-parallel-call": SECOND_CUT,
    "deepseek/vllm-v3-malformed-missing-brace": STREAMED,
    "gemma4/truncated-before-close": CUT,
    "gemma4/truncated-mid-string": CUT,
    "gemma4/truncated-second-parallel-call": SECOND_CUT,
    "gemma4/vllm-text-before-call": CONTRADICTION,
    "glm/glm45-truncated-after-arg-key": CUT,
    "glm/glm47-truncated-before-close-call": CUT,
    "glm/glm47-truncated-inside-arg-value": CUT,
    "gpt-oss/harmony-truncated-in-arguments": CUT,
    "kimi/k26-truncated-inside-arguments": CUT,
    "kimi/k3-truncated-inside-argument": CUT,
    "llama/l3-truncated-inside-parameters": CUT,
    "llama/l4-truncated-missing-close-bracket": CUT,
    "mistral/v13think-truncated-in-arguments": CUT,
    "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments": CUT,
    "qwen3-hermes/truncated-mid-arguments-no-thinking": CUT,
    "qwen3-hermes/truncated-mid-arguments-thinking": CUT,
    "qwen3-hermes/truncated-second-parallel-call": SECOND_CUT,
    "qwen3-hermes/vllm-invalid-json-missing-brace": CUT,
    "qwen3-xml/q38-truncated-in-parameter": CUT,
}
"""Fixtures whose expectation does not hold, with the reason."""


def split(pieces: list[Piece], strategy: ChunkStrategy) -> Iterator[list[Piece]]:
    """Yield the pieces of each delta of a stream."""
    start = 0
    for size in group_sizes(
        len(pieces), strategy, [not isinstance(piece, str) for piece in pieces]
    ):
        yield pieces[start : start + size]
        start += size


@pytest.mark.parametrize("fixture_id", FIXTURES)
def test_parses_fixture_exactly_in_every_chunking(fixture_id: str) -> None:
    fixture = FIXTURES[fixture_id]
    pieces = pieces_of(fixture)
    streams = {
        strategy.id: parse(fixture, split(pieces, strategy)) for strategy in DEFAULT_STRATEGIES
    }
    whole = parse(fixture, [pieces])
    assert all(result == whole for result in streams.values())
    rows = run_checks(
        fixture, FAMILIES[fixture.family], Observation(nonstream=whole, streams=streams)
    )
    problems = [row for row in rows if row.status is not Status.PASS]
    assert bool(problems) == (fixture_id in EXCEPTIONS), problems


def test_only_one_complete_output_is_an_exception() -> None:
    complete = {
        fixture_id
        for fixture_id in EXCEPTIONS
        if FIXTURES[fixture_id].expected and not FIXTURES[fixture_id].truncated
    }
    assert complete == {"gemma4/vllm-text-before-call"}
