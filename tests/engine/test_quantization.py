"""Quantized weights: accuracy, equal bits on every instruction set and in every batch, and rejected formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import quality
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from argosy.engine.engine_config import EngineConfig, IntFormat
from argosy.engine.execution.checkpoint_formats.quantization import (
    QuantizedWeight,
    quantize_rows,
    quantize_weight,
)
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.layers.modules import Projection
from argosy.engine.execution.loading.executor_loader import load_executor
from argosy.models import BUNDLED_MODEL
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.isas import ISAS
from tests.engine.pairwise import pairwise
from tests.engine.transformers_reference import VOCAB, make_reference

FORMATS: list[IntFormat] = ["int8", "int4"]
SHAPES = [(896, 896), (100, 70), (17, 33), (33, 320), (64, 256), (1, 1), (130, 1000)]
BATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 129, 259)
NOISE = {"int8": 0.009, "int4": 0.09}
"""Maximum error of a product of normal random numbers, relative to its standard deviation."""


def random_linear(outs: int, cols: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outs + cols)
    weight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    return (
        weight,
        torch.randn(outs, generator=generator),
        torch.randn(rows, cols, generator=generator),
    )


def create_linear(
    weight: Tensor, bias: Tensor | None, weight_format: IntFormat, threads: int = 2
) -> Callable[[Tensor], Tensor]:
    before = torch.get_num_threads()
    linear = create_cpu_device(threads).create_linear(weight, bias, weight_format)
    torch.set_num_threads(before)
    return linear


def quantize(weight: Tensor, weight_format: IntFormat) -> QuantizedWeight:
    (quantized,) = quantize_weight(weight, weight_format)
    return quantized


@cache
def torch_reference(shape: tuple[int, int], dtype: torch.dtype, weight_format: IntFormat) -> Tensor:
    """Compute the result that torch's operations define."""
    from argosy.engine.execution.kernels.cpu.linear import TorchIntLinear

    weight, bias, x = random_linear(*shape, max(BATCHES))
    return TorchIntLinear(weight.to(dtype), bias.to(dtype), weight_format)(x.to(dtype))


@pairwise(
    weight_format=FORMATS,
    shape=SHAPES,
    dtype=[torch.float32, torch.bfloat16],
    isa=ISAS,
    indirect=["isa"],
)
def test_every_isa_and_batch_gives_same_bits(
    weight_format: IntFormat, shape: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    weight, bias, x = (each.to(dtype) for each in random_linear(*shape, max(BATCHES)))
    expected = torch_reference(shape, dtype, weight_format)
    assert expected.dtype == dtype
    for threads in (1, 3):
        linear = create_linear(weight, bias, weight_format, threads)
        for rows in BATCHES:
            assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows on {isa}"
            assert torch.equal(linear(x[-rows:]), expected[-rows:])


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_results_are_close_to_exact(weight_format: IntFormat, shape: tuple[int, int]) -> None:
    weight, bias, x = random_linear(*shape, 100)
    exact = x.double() @ weight.double().T + bias.double()
    error = (create_linear(weight, bias, weight_format)(x) - exact).square().mean().sqrt()
    assert error < NOISE[weight_format] * exact.std()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_outlier_affects_accuracy_of_its_chunk_only(weight_format: IntFormat) -> None:
    """Real models have single inputs that are a thousand times larger than the others."""
    weight, bias, x = random_linear(256, 1024, 8)
    x[:, 300] = 1000.0
    weight[:, 300] = 0.0
    exact = x.double() @ weight.double().T + bias.double()
    out = create_linear(weight, bias, weight_format)(x)
    assert (out - exact).square().mean().sqrt() < 0.6 * exact.std()


@pairwise(
    weight_format=FORMATS,
    value=[float("nan"), float("inf"), float("-inf")],
    isa=ISAS,
    indirect=["isa"],
)
def test_non_finite_input_affects_own_row_only(
    weight_format: IntFormat, value: float, isa: str
) -> None:
    weight, bias, x = random_linear(100, 600, 40)
    linear = create_linear(weight, bias, weight_format)
    clean = linear(x)
    x[7, 599] = value
    with_value = linear(x)
    assert with_value[7].isnan().all()
    others = [row for row in range(40) if row != 7]
    assert torch.equal(with_value[others], clean[others])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_zero_and_denormal_values_give_zero(weight_format: IntFormat, isa: str) -> None:
    weight, bias, x = random_linear(64, 300, 3)
    x[0], x[1] = 0.0, 1e-38
    out = create_linear(weight, bias, weight_format)(x)
    assert torch.equal(out[:2], bias.expand(2, -1))
    out = create_linear(torch.zeros(64, 300), bias, weight_format)(x)
    assert torch.equal(out, bias.expand(3, -1))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_strided_and_empty_inputs_are_accepted(weight_format: IntFormat, isa: str) -> None:
    weight, bias, x = random_linear(64, 96, 20)
    linear = create_linear(weight, bias, weight_format)
    wide = torch.zeros(20, 200)
    wide[:, 50:146] = x
    assert torch.equal(linear(wide[:, 50:146]), linear(x))
    assert linear(x.T.contiguous().T).equal(linear(x))
    assert linear(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_float16_is_accepted(weight_format: IntFormat) -> None:
    weight, bias, x = (each.half() for each in random_linear(64, 96, 5))
    out = create_linear(weight, bias, weight_format)(x)
    assert out.dtype == torch.float16
    exact = x.double() @ weight.double().T + bias.double()
    assert (out - exact).square().mean().sqrt() < NOISE[weight_format] * exact.std()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cols=st.integers(1, 600),
    spread=st.sampled_from([1e-33, 1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 0.9, -3.0]),
)
def test_int4_weights_expand_to_int8(seed: int, cols: int, spread: float, shift: float) -> None:
    """All weights give integers that fit into 8 bits and are close to the weights."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(3, cols, generator=generator) + shift) * spread
    quantized = quantize(weight, "int4")
    assert quantized.groups is not None
    zeros, multipliers = quantized.groups.int() >> 4, quantized.groups.int() & 15
    values = quantized.values.int()
    assert int(values.min()) >= 0
    assert int(values.max()) <= 15
    expanded = (values - expand_groups(zeros, cols)) * expand_groups(multipliers, cols)
    assert torch.equal(expanded, quantized.to_int8().int())
    assert int(expanded.abs().max()) <= 127
    if spread >= 1e-6:
        assert (quantized.dequantize() - weight).abs().amax() <= weight.abs().amax() * 0.2


def expand_groups(groups: Tensor, cols: int) -> Tensor:
    """Repeat values of groups of 32, [N, groups], to [N, cols]."""
    return groups.repeat_interleave(32, 1)[:, :cols]


@given(seed=st.integers(0, 2**32), cols=st.integers(1, 600))
@settings(max_examples=40, deadline=None)
def test_int8_error_is_at_most_half_a_step(seed: int, cols: int) -> None:
    weight = torch.randn(3, cols, generator=torch.Generator().manual_seed(seed))
    quantized = quantize(weight, "int8")
    steps = quantized.scales.repeat_interleave(256, 1)[:, :cols]
    assert ((quantized.dequantize() - weight).abs() <= steps * 0.5001).all()
    integers, scales = quantize_rows(weight)
    dequantized = (integers * scales.unsqueeze(-1)).flatten(1)[:, :cols]
    assert ((dequantized - weight).abs() <= steps * 0.5001).all()


def test_non_finite_weights_are_rejected() -> None:
    weight = torch.ones(40, 300)
    weight[33, 2] = float("inf")
    for weight_format in FORMATS:
        with pytest.raises(ValueError, match="damaged, fetch it again"):
            create_cpu_device(1).create_linear(weight, None, weight_format)


def test_fp8_is_rejected_on_cpu() -> None:
    with pytest.raises(ValueError, match="no fp8 weights; set quantize to int8 or int4"):
        load_executor(
            EngineConfig(model=str(BUNDLED_MODEL), quantize="fp8"),
            lambda _activity, _fraction: None,
        )


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "odd": ("Qwen2", {"hidden_size": 60, "intermediate_size": 90, "head_dim": 14}),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_family_is_close_to_dense_model(family: str, tmp_path: Path) -> None:
    """The error of the logits is small with 8 bits and larger with 4. Batching and chunking do not change bits."""
    name, options = FAMILIES[family]
    path = make_reference(tmp_path, name, options).path
    tokens = [(7 * index + 3) % VOCAB for index in range(50)]
    logits = {}
    for weight_format in (None, *FORMATS):
        decoder = load_checkpoint(path, quantize=weight_format)
        driver = DecoderDriver(decoder)
        logits[weight_format] = driver.logits_in_one_chunk(tokens)
        if weight_format is not None:
            driver.forward([("a", tokens[:9])])
            chunk_logits = driver.forward([("b", tokens[20:]), ("a", tokens[9:])])
            assert torch.equal(chunk_logits[1], logits[weight_format][9:])
    spread = logits[None].std()
    errors = {
        weight_format: (logits[weight_format] - logits[None]).square().mean().sqrt() / spread
        for weight_format in FORMATS
    }
    assert errors["int8"] < 0.1
    assert errors["int8"] < errors["int4"] < 0.6


def test_int4_keeps_head_at_int8_and_routers_dense(tmp_path: Path) -> None:
    path = make_reference(tmp_path, "Mixtral", {"num_local_experts": 4}).path
    decoder = load_checkpoint(path, quantize="int4")
    formats = {
        name.rsplit(".", 1)[-1]: module.weight_format
        for name, module in decoder.named_modules()
        if isinstance(module, Projection)
    }
    assert formats["head"] == "int8"
    assert formats["router"] is None
    assert {formats[name] for name in ("qkv", "o", "gate_up", "down")} == {"int4"}


def test_format_is_reported_and_changes_fingerprint() -> None:
    executors = {
        weight_format: load_executor(
            EngineConfig(
                model=str(BUNDLED_MODEL),
                quantize=weight_format,
                num_blocks=64,
                warmup=False,
                threads=1,
            ),
            lambda _activity, _fraction: None,
        )
        for weight_format in (None, *FORMATS)
    }
    for weight_format in FORMATS:
        assert f" {weight_format} " in executors[weight_format].backend
    assert len({executor.fingerprint for executor in executors.values()}) == 3


@cache
def predict_held_out_text(weight_format: IntFormat | None) -> list[quality.Prediction]:
    return quality.predictions(BUNDLED_MODEL, quality.held_out(2000), weight_format)


@pytest.mark.parametrize(
    ("weight_format", "ratio", "agreement"), [("int8", 1.01, 0.97), ("int4", 1.02, 0.95)]
)
def test_quantized_bundled_model_keeps_quality(
    weight_format: IntFormat, ratio: float, agreement: float
) -> None:
    """Perplexity and likeliest tokens, on text that the model was not trained on, stay within limits."""
    dense, quantized = predict_held_out_text(None), predict_held_out_text(weight_format)
    assert quality.perplexity(quantized) < ratio * quality.perplexity(dense)
    assert quality.agreement(quantized, dense) >= agreement
