"""Norms, gated activations and the gated delta rule on the CPU: accuracy, and bits that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from argosy.engine.execution.architectures.decoder import Activation, DeltaNetArchitecture, NormKind
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.operations import NativeElementwiseOps
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights, ElementwiseOps
from argosy.engine.execution.kernels.torch.operations import TorchElementwiseOps
from argosy.native import NativeUnavailableError
from tests.engine.pairwise import pairwise

CPU = torch.device("cpu")
SIZES = (320, 128, 70, 16, 7)
DTYPES = (torch.float32, torch.bfloat16)
# The last bit of bfloat16 is 2^-8 of the value. float32 results differ by the order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 128}


def native_ops(threads: int = 2) -> NativeElementwiseOps:
    try:
        return NativeElementwiseOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def random_tensor(*shape: int, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def assert_norm_matches_torch(
    ops: ElementwiseOps,
    kind: NormKind,
    size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Check a norm of rows, of the heads in a slice of wider rows, and of sums."""
    weight, x, delta, heads = (
        random_tensor(*shape, size, dtype=dtype, device=device)
        for shape in ((), (9,), (9,), (5, 6))
    )
    delta = delta.flip(0)
    actual, expected = (
        each.create_norm(kind, weight, 1e-6) for each in (ops, TorchElementwiseOps())
    )
    assert_close(actual(x), expected(x))
    assert_close(actual(heads[:, 1:4]), expected(heads[:, 1:4]))
    summed, reference = x.clone(), x.clone()
    assert_close(actual.add_and_norm(summed, delta), expected.add_and_norm(reference, delta))
    assert torch.equal(summed, reference)
    assert torch.equal(actual.add_and_norm(x.clone(), delta), actual(summed))


def assert_gated_activation_matches_torch(
    ops: ElementwiseOps,
    activation: Activation,
    size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    rows: int = 40,
) -> None:
    """Check ordinary, extreme and invalid inputs."""
    x = random_tensor(rows, 2 * size, dtype=dtype, device=device)
    x[0, :size], x[1, :size], x[2, :size] = -1e4, 1e4, 0.0
    actual, expected = (
        each.create_gated_activation(activation) for each in (ops, TorchElementwiseOps())
    )
    torch.testing.assert_close(actual(x), expected(x), atol=2e-5, rtol=TOLERANCE[dtype])
    x[3, 0] = torch.nan
    assert actual(x)[3, 0].isnan()


def create_all_ops(
    ops: ElementwiseOps, size: int, dtype: torch.dtype, device: torch.device = CPU
) -> list[Callable[..., torch.Tensor]]:
    """Return a function of x [T, 2 * size] for each operation."""
    weight = random_tensor(size, dtype=dtype, device=device)
    norms = [ops.create_norm(kind, weight, 1e-6) for kind in get_args(NormKind)]
    return [
        *(lambda x, norm=norm: norm(x[:, :size].contiguous()) for norm in norms),
        *(ops.create_gated_activation(activation) for activation in get_args(Activation)),
    ]


def assert_rows_are_independent(
    ops: ElementwiseOps, size: int, dtype: torch.dtype, rows: int, device: torch.device = CPU
) -> None:
    """Check that no operation's bits of a row depend on the batch, which may be empty."""
    x = random_tensor(rows, 2 * size, dtype=dtype, device=device)
    for op in create_all_ops(ops, size, dtype, device):
        full = op(x)
        for first, last in ((0, 1), (1, 4), (31, 64), (rows - 1, rows)):
            assert torch.equal(op(x[first:last]), full[first:last])
        assert op(x[:0]).shape == (0, size)


@pairwise(kind=get_args(NormKind), size=SIZES, dtype=DTYPES)
def test_norm_matches_torch(kind: NormKind, size: int, dtype: torch.dtype) -> None:
    assert_norm_matches_torch(native_ops(), kind, size, dtype)


@pairwise(activation=get_args(Activation), size=SIZES, dtype=DTYPES)
def test_gated_activation_matches_torch(
    activation: Activation, size: int, dtype: torch.dtype
) -> None:
    assert_gated_activation_matches_torch(native_ops(), activation, size, dtype)


@pairwise(backend=["native", "torch"], size=[320, 70], dtype=DTYPES)
def test_batch_does_not_change_row_bits(backend: str, size: int, dtype: torch.dtype) -> None:
    ops = native_ops() if backend == "native" else TorchElementwiseOps()
    assert_rows_are_independent(ops, size, dtype, rows=1000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_does_not_change_bits(dtype: torch.dtype) -> None:
    x = random_tensor(500, 640, dtype=dtype)
    ops_by_threads = [create_all_ops(native_ops(threads), 320, dtype) for threads in (1, 2, 5)]
    for one_thread, *others in zip(*ops_by_threads, strict=True):
        assert all(torch.equal(one_thread(x), other(x)) for other in others)


def test_dtype_without_kernel_uses_torch() -> None:
    ops, x = native_ops(), random_tensor(3, 64, dtype=torch.float64)
    assert torch.equal(
        ops.create_gated_activation("silu")(x),
        TorchElementwiseOps().create_gated_activation("silu")(x),
    )
    weight = torch.ones(64, dtype=torch.float64)
    assert ops.create_norm("wide", weight, 1e-6)(x).dtype == torch.float64


LENGTHS = (1, 3, 23)
LAYER = 1
NETS = {
    "one part of columns": DeltaNetArchitecture(2, 4, 16, 64, 4),
    "ragged": DeltaNetArchitecture(1, 3, 20, 72, 3),
    "several parts": DeltaNetArchitecture(2, 2, 128, 128, 4),
}
Chunk = tuple[int, int, int]
"""Sequence, start and end."""
CreateDeltaRule = Callable[[DeltaNetArchitecture, DeltaRuleWeights], DeltaRule]


class DeltaRuleCase:
    """Random inputs of sequences, each with a slot of its own, and free slots after them."""

    def __init__(
        self,
        net: DeltaNetArchitecture,
        dtype: torch.dtype,
        create_rule: CreateDeltaRule,
        device: torch.device = CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(net.value_size)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.net = net
        self.weights = DeltaRuleWeights(
            random(net.conv_width, net.channels),
            -random(net.value_heads).exp(),
            random(net.value_heads),
        )
        self.qkv = [random(length, net.channels).to(dtype) for length in LENGTHS]
        self.factors = [random(length, 2 * net.value_heads).to(dtype) for length in LENGTHS]
        self.rule = create_rule(net, self.weights)
        # states of earlier sequences, which must not be read
        table = torch.full((2 * len(LENGTHS), 2 * net.state_elements), torch.nan, device=device)
        self.states = BatchStates(table, net.state_elements)

    def run(self, chunks: list[Chunk], saved: dict[int, int] | None = None) -> list[torch.Tensor]:
        """Compute chunks in one batch. `saved` maps flat tokens to the slots where their states are saved."""
        counts = [end - start for _, start, end in chunks]
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        save_slots = torch.full_like(positions, -1)
        for token, slot in (saved or {}).items():
            save_slots[token] = slot
        device = self.states.table.device
        positions, save_slots = positions.to(device), save_slots.to(device)
        batch = Batch(
            token_ids=positions,
            positions=positions,
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            seq_lens=torch.tensor([end for _, _, end in chunks]).int().to(device),
            block_tables=torch.empty(0, len(chunks), 0, dtype=torch.int32),
            slot_mappings=torch.empty(0, len(positions), dtype=torch.int64),
            rows=torch.tensor([sequence for sequence, _, _ in chunks]).to(device),
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
        """Compute a sequence with transformers, whose module takes a second to import."""
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

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
@pairwise(size=NETS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_result_is_that_of_transformers_in_any_batch_and_chunks(
    size: str, dtype: torch.dtype
) -> None:
    create_rule = create_cpu_device(2).create_delta_rule
    assert_delta_rule_is_exact(DeltaRuleCase(NETS[size], dtype, create_rule))


def assert_delta_rule_is_exact(case: DeltaRuleCase) -> None:
    """Check the results against transformers, and that batches, chunks and saved states do not change a bit."""
    dtype = case.qkv[0].dtype
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
