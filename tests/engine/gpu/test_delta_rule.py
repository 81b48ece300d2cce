"""Gated delta rule on the GPU: agreement with transformers, and equal bits for every batching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.gpu.delta_rule import TritonDeltaRule
from tests.engine.gpu.device import DEVICE
from tests.engine.test_operations import (
    NETS,
    CreateDeltaRule,
    DeltaRuleCase,
    assert_delta_rule_is_exact,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here


class DeltaRuleWithUnusedRow(TritonDeltaRule):
    """Delta rule that adds an unused row to each batch, as captured graphs have."""

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        padded = replace(
            batch,
            rows=F.pad(batch.rows, (0, 1), value=1 << 20),
            positions=F.pad(batch.positions, (0, 1)),
            query_start_loc=F.pad(batch.query_start_loc, (0, 1), value=len(qkv) + 1),
            seq_lens=F.pad(batch.seq_lens, (0, 1)),
        )
        if states.save_slots is not None:
            states = replace(states, save_slots=F.pad(states.save_slots, (0, 1), value=1 << 20))
        qkv, factors = (F.pad(x, (0, 0, 0, 1), value=torch.nan) for x in (qkv, factors))
        out = super().__call__(qkv, factors, states, layer, padded)
        assert not out[-1].any()
        return out[:-1]


@pytest.mark.parametrize(
    ("net", "dtype", "create_rule"),
    [
        (DeltaNetArchitecture(1, 3, 20, 12, 3), torch.bfloat16, TritonDeltaRule),
        (DeltaNetArchitecture(2, 2, 8, 5, 4), torch.float32, DeltaRuleWithUnusedRow),
        *(
            pytest.param(net, torch.float32, TritonDeltaRule, marks=pytest.mark.exhaustive)
            for net in NETS.values()
        ),
    ],
    ids=str,
)
def test_result_is_that_of_transformers_in_any_batch_and_chunks(
    net: DeltaNetArchitecture, dtype: torch.dtype, create_rule: CreateDeltaRule
) -> None:
    assert_delta_rule_is_exact(DeltaRuleCase(net, dtype, create_rule, DEVICE))
