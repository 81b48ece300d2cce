"""Speculative decoding: drafts, right or wrong, change neither tokens nor log-probabilities nor finish reasons."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

import pytest

from argosy.engine.execution.drafting import Draft
from argosy.engine.scheduling import Sequence
from argosy.engine.serving.engine_core.core import EngineCore
from tests.engine.core_driver import run_requests
from tests.engine.test_equivalence import (
    DTYPES,
    assert_equal_to_reference,
    create,
    reference_output,
    requests,
)

VOCAB = 4096


@dataclass
class ScriptedDrafter:
    """Drafter that knows the outputs without drafts, and proposes other tokens as its kind says."""

    kind: str
    outputs: dict[str, list[int]]
    name: str = "scripted"
    released: list[str] = field(default_factory=list)

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [
            Draft(self._draft(seq, limit)) for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _draft(self, seq: Sequence, limit: int) -> list[int]:
        output, length = self.outputs[seq.id], seq.output_len
        right = [*output, *[7] * limit][length : length + limit]
        match self.kind:
            case "right":
                return right
            case "wrong":
                return [(token + 1) % VOCAB for token in right]
            case "mixed":
                return [(token + (length + i) % 3 // 2) % VOCAB for i, token in enumerate(right)]
            case _:
                return [*right[: length % 3], VOCAB + length, -length]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def create_drafting(kind: str, dtype: str = "bfloat16", **options: object) -> EngineCore:
    core = create(0, dtype, warmup=True, **options)
    assert core.speculation is not None
    outputs = {
        request.id: reference_output(number, dtype).tokens
        for number, request in enumerate(requests())
    }
    core.speculation.drafters = [ScriptedDrafter(kind, outputs)]
    return core


@pytest.mark.parametrize(
    ("kind", "accepted"), [("right", (0.9, 1.0)), ("wrong", (0, 0)), ("mixed", (0.2, 0.8))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_change_no_output(kind: str, accepted: tuple[float, float], dtype: str) -> None:
    core = create_drafting(kind, dtype)
    assert_equal_to_reference(run_requests(core, requests()), dtype)
    speculation = core.speculation
    assert speculation is not None
    fraction = speculation.accepted_tokens["scripted"] / speculation.draft_tokens["scripted"]
    assert accepted[0] <= fraction <= accepted[1]
    by_position = speculation.accepted_by_position.values()
    assert sum(map(sum, by_position)) == speculation.accepted_tokens.total()
