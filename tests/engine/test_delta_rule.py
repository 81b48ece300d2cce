"""Gated delta rule: results are those of transformers, and their bits depend on no other sequence and no chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights
from tests.engine.pairwise import pairwise

LENGTHS = (1, 3, 23)
LAYER = 1
SIZES = {
    "one part of columns": DeltaNetArchitecture(2, 4, 16, 64, 4),
    "ragged": DeltaNetArchitecture(1, 3, 20, 72, 3),
    "several parts": DeltaNetArchitecture(2, 2, 128, 128, 4),
}
Chunk = tuple[int, int, int]
"""Sequence, start and end."""


class DeltaRuleCase:
    """Random inputs of sequences, each with a slot of its own, and free slots after them."""

    def __init__(self, net: DeltaNetArchitecture, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(net.value_size)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.net = net
        self.weights = DeltaRuleWeights(
            random(net.conv_width, net.channels),
            -random(net.value_heads).exp(),
            random(net.value_heads),
        )
        self.qkv = [random(length, net.channels).to(dtype) for length in LENGTHS]
        self.factors = [random(length, 2 * net.value_heads).to(dtype) for length in LENGTHS]
        self.rule: DeltaRule = create_cpu_device(2).create_delta_rule(net, self.weights)
        # states of earlier sequences, which must not be read
        table = torch.full((2 * len(LENGTHS), 2 * net.state_elements), torch.nan)
        self.states = BatchStates(table, net.state_elements)

    def run(self, chunks: list[Chunk], saved: dict[int, int] | None = None) -> list[torch.Tensor]:
        """Compute chunks in one batch. `saved` maps flat tokens to the slots where their states are saved."""
        counts = [end - start for _, start, end in chunks]
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        save_slots = torch.full_like(positions, -1)
        for token, slot in (saved or {}).items():
            save_slots[token] = slot
        batch = Batch(
            token_ids=positions,
            positions=positions,
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, _, end in chunks]).int(),
            block_tables=torch.empty(0, len(chunks), 0, dtype=torch.int32),
            slot_mappings=torch.empty(0, len(positions), dtype=torch.int64),
            rows=torch.tensor([sequence for sequence, _, _ in chunks]),
            logit_index=positions,
        )
        out = self.rule(
            torch.cat([self.qkv[sequence][start:end] for sequence, start, end in chunks]),
            torch.cat([self.factors[sequence][start:end] for sequence, start, end in chunks]),
            replace(self.states, save_slots=save_slots if saved else None),
            LAYER,
            batch,
        )
        return list(out.split(counts))

    def expected(self, sequence: int) -> torch.Tensor:
        """Compute a sequence with transformers."""
        net = self.net
        padded = F.pad(self.qkv[sequence].float().T, (net.conv_width - 1, 0))
        mixed = F.silu(F.conv1d(padded, self.weights.conv.T.unsqueeze(1), groups=net.channels)).T
        keys = net.key_heads * net.key_dim
        query, key, value = mixed.unsqueeze(0).split((keys, keys, net.value_size), -1)
        update, decay = self.factors[sequence].float().unsqueeze(0).chunk(2, -1)
        out, _ = torch_recurrent_gated_delta_rule(
            query.unflatten(-1, (net.key_heads, -1)),
            key.unflatten(-1, (net.key_heads, -1)),
            value.unflatten(-1, (net.value_heads, -1)),
            g=self.weights.decay_rate * F.softplus(decay + self.weights.decay_bias),
            beta=update.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        result: torch.Tensor = out[0]
        return result


@pytest.mark.usefixtures("isa")
@pairwise(size=SIZES, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_result_is_that_of_transformers_in_any_batch_and_chunks(
    size: str, dtype: torch.dtype
) -> None:
    case = DeltaRuleCase(SIZES[size], dtype)
    sequences = range(len(LENGTHS))
    alone = [case.run([(n, 0, LENGTHS[n])])[0] for n in sequences]
    tolerance = 2e-5 if dtype == torch.float32 else 1 / 64
    for n in sequences:
        torch.testing.assert_close(
            alone[n].float(), case.expected(n), atol=tolerance, rtol=tolerance
        )
    final = case.states.table.clone()
    batched = case.run([(n, 0, LENGTHS[n]) for n in reversed(sequences)])
    assert all(map(torch.equal, reversed(batched), alone))
    longest, length = sequences[-1], LENGTHS[-1]
    (first,) = case.run([(longest, 0, 9)])
    middle, _ = case.run([(longest, 9, 20), (0, 0, 1)], saved={4: 3, 10: 4, 11: 5})
    (last,) = case.run([(longest, 20, length)])
    assert torch.equal(torch.cat((first, middle, last)), alone[longest])
    used = case.states.table[:, case.net.state_elements :]
    assert torch.equal(used[: len(LENGTHS)], final[: len(LENGTHS), case.net.state_elements :])
    assert case.states.table[:, : case.net.state_elements].isnan().all()  # the other layer's
    for slot, position in ((3, 14), (4, 20)):  # the saved states continue as the sequence did
        used[longest] = used[slot]
        (rest,) = case.run([(longest, position, length)])
        assert torch.equal(rest, alone[longest][position:])
    assert torch.equal(used[5], used[0])
