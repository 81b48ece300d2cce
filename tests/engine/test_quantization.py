"""Quantization of weights: the error of each format, of model families and of the bundled model, and its identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import quality
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from argosy.engine.engine_config import EngineConfig, IntFormat
from argosy.engine.execution.checkpoint_formats.grouped_weight import quantize_to_groups
from argosy.engine.execution.checkpoint_formats.quantization import (
    QuantizedWeight,
    quantize_rows,
    quantize_weight,
)
from argosy.engine.execution.layers.modules import Projection
from argosy.engine.execution.loading.executor_loader import load_executor
from argosy.models import BUNDLED_MODEL
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.transformers_reference import VOCAB, make_reference

FORMATS: list[IntFormat] = ["int8", "int4"]


def quantize(weight: Tensor, weight_format: IntFormat) -> QuantizedWeight:
    (quantized,) = quantize_weight(weight, weight_format)
    return quantized


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
    assert_groups_are_equal(weight, "int4")
    if spread >= 1e-6:
        assert (quantized.dequantize() - weight).abs().amax() <= weight.abs().amax() * 0.2


def assert_groups_are_equal(weight: Tensor, weight_format: IntFormat) -> None:
    """Check that scales and offsets of groups stand for the weights that the integers stand for."""
    expected = quantize(weight, weight_format).dequantize()
    grouped = quantize_to_groups(weight, weight_format).dequantize()
    assert (grouped - expected).abs().amax() <= expected.abs().amax() * 1e-5


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
    assert_groups_are_equal(weight, "int8")


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


def test_quantized_bundled_model_keeps_quality() -> None:
    """Perplexity and likeliest tokens, on text that the model was not trained on, stay within limits."""
    text = quality.held_out(2000)
    dense = quality.predictions(BUNDLED_MODEL, text, {})
    bounds = {
        "int8": (1.01, 0.97),
        "int4": (1.02, 0.95),
        "bfloat16, KV int8": (1.002, 0.98),
    }
    for name, (ratio, agreement) in bounds.items():
        quantized = quality.predictions(BUNDLED_MODEL, text, quality.FORMATS[name])
        assert quality.perplexity(quantized) < ratio * quality.perplexity(dense)
        assert quality.agreement(quantized, dense) >= agreement
