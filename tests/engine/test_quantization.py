"""Quantized weights: near what they stand for, the same bits on every path and in every batch, and refused by name."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks import quality
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.engine_config import EngineConfig, IntFormat
from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.device import create_cpu_device
from argosy.engine.execution.executor_loader import load_executor
from argosy.engine.execution.layers import Projection
from argosy.engine.execution.quantization import QuantizedWeight, quantize_rows, quantize_weight
from argosy.engine.execution.weight_loader import load_decoder
from argosy.models import BUNDLED_MODEL
from tests.engine.decoder_driver import Runner
from tests.engine.transformers_reference import VOCAB, make_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

FORMATS: list[IntFormat] = ["int8", "int4"]
SHAPES = [(896, 896), (100, 70), (17, 33), (33, 320), (64, 256), (1, 1), (130, 1000)]
BATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 129, 259)
NOISE = {"int8": 0.009, "int4": 0.09}
"""Most error of a product of normal random numbers, as a share of its spread."""


def made(outs: int, cols: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outs + cols)
    weight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    return (
        weight,
        torch.randn(outs, generator=generator),
        torch.randn(rows, cols, generator=generator),
    )


def linear_of(
    weight: Tensor, bias: Tensor | None, form: IntFormat, threads: int = 2
) -> Callable[[Tensor], Tensor]:
    before = torch.get_num_threads()
    linear = create_cpu_device(threads).create_linear(weight, bias, form)
    torch.set_num_threads(before)
    return linear


def whole_of(weight: Tensor, form: IntFormat) -> QuantizedWeight:
    (found,) = quantize_weight(weight, form)
    return found


@cache
def by_torch(shape: tuple[int, int], dtype: torch.dtype, form: IntFormat) -> Tensor:
    """The definition: torch's own result."""
    from argosy.engine.execution.linear_int_cpu import TorchIntLinear

    weight, bias, x = made(*shape, max(BATCHES))
    return TorchIntLinear(weight.to(dtype), bias.to(dtype), form)(x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_every_path_and_batch_gives_the_same_bits(
    form: IntFormat, shape: tuple[int, int], dtype: torch.dtype, path: str
) -> None:
    weight, bias, x = (each.to(dtype) for each in made(*shape, max(BATCHES)))
    expected = by_torch(shape, dtype, form)
    assert expected.dtype == dtype
    for threads in (1, 3):
        linear = linear_of(weight, bias, form, threads)
        for rows in BATCHES:
            assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows on {path}"
            assert torch.equal(linear(x[-rows:]), expected[-rows:])


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_results_are_near_the_exact_ones(form: IntFormat, shape: tuple[int, int]) -> None:
    weight, bias, x = made(*shape, 100)
    exact = x.double() @ weight.double().T + bias.double()
    error = (linear_of(weight, bias, form)(x) - exact).square().mean().sqrt()
    assert error < NOISE[form] * exact.std()


@pytest.mark.parametrize("form", FORMATS)
def test_an_outlier_costs_its_own_chunk_only(form: IntFormat) -> None:
    """One input a thousand times the others, as real models have them."""
    weight, bias, x = made(256, 1024, 8)
    x[:, 300] = 1000.0
    weight[:, 300] = 0.0
    exact = x.double() @ weight.double().T + bias.double()
    found = linear_of(weight, bias, form)(x)
    assert (found - exact).square().mean().sqrt() < 0.6 * exact.std()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_value_that_is_not_finite_spoils_its_row_only(
    form: IntFormat, bad: float, path: str
) -> None:
    weight, bias, x = made(100, 600, 40)
    linear = linear_of(weight, bias, form)
    clean = linear(x)
    x[7, 599] = bad
    spoilt = linear(x)
    assert spoilt[7].isnan().all(), path
    others = [row for row in range(40) if row != 7]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_specks_are_zero(form: IntFormat, path: str) -> None:
    weight, bias, x = made(64, 300, 3)
    x[0], x[1] = 0.0, 1e-38
    out = linear_of(weight, bias, form)(x)
    assert torch.equal(out[:2], bias.expand(2, -1)), path
    nothing = linear_of(torch.zeros(64, 300), bias, form)(x)
    assert torch.equal(nothing, bias.expand(3, -1))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_may_lie_apart_and_be_none(form: IntFormat, path: str) -> None:
    weight, bias, x = made(64, 96, 20)
    linear = linear_of(weight, bias, form)
    wide = torch.zeros(20, 200)
    wide[:, 50:146] = x
    assert torch.equal(linear(wide[:, 50:146]), linear(x)), path
    assert linear(x.T.contiguous().T).equal(linear(x))
    assert linear(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("form", FORMATS)
def test_half_precision_is_taken_too(form: IntFormat) -> None:
    weight, bias, x = (each.half() for each in made(64, 96, 5))
    out = linear_of(weight, bias, form)(x)
    assert out.dtype == torch.float16
    exact = x.double() @ weight.double().T + bias.double()
    assert (out - exact).square().mean().sqrt() < NOISE[form] * exact.std()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cols=st.integers(1, 600),
    spread=st.sampled_from([1e-33, 1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 0.9, -3.0]),
)
def test_4_bits_are_8_bits_in_fewer(seed: int, cols: int, spread: float, shift: float) -> None:
    """Whatever the weights: whole numbers that 8 bits hold, near the weights."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(3, cols, generator=generator) + shift) * spread
    found = whole_of(weight, "int4")
    assert found.groups is not None
    zeros, multipliers = found.groups.int() >> 4, found.groups.int() & 15
    values = found.values.int()
    assert int(values.min()) >= 0
    assert int(values.max()) <= 15
    wide = (values - widened(zeros, cols)) * widened(multipliers, cols)
    assert torch.equal(wide, found.to_int8().int())
    assert int(wide.abs().max()) <= 127
    if spread >= 1e-6:
        assert (found.dequantize() - weight).abs().amax() <= weight.abs().amax() * 0.2


def widened(groups: Tensor, cols: int) -> Tensor:
    """[N, groups of 32] to [N, cols]."""
    return groups.repeat_interleave(32, 1)[:, :cols]


@given(seed=st.integers(0, 2**32), cols=st.integers(1, 600))
@settings(max_examples=40, deadline=None)
def test_8_bits_are_off_by_half_a_step(seed: int, cols: int) -> None:
    weight = torch.randn(3, cols, generator=torch.Generator().manual_seed(seed))
    found = whole_of(weight, "int8")
    steps = found.scales.repeat_interleave(256, 1)[:, :cols]
    assert ((found.dequantize() - weight).abs() <= steps * 0.5001).all()
    integers, scales = quantize_rows(weight)
    near = (integers * scales.unsqueeze(-1)).flatten(1)[:, :cols]
    assert ((near - weight).abs() <= steps * 0.5001).all()


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = torch.ones(40, 300)
    weight[33, 2] = float("inf")
    for form in FORMATS:
        with pytest.raises(ValueError, match="damaged, fetch it again"):
            create_cpu_device(1).create_linear(weight, None, form)


def test_the_cpu_refuses_fp8_by_name() -> None:
    with pytest.raises(ValueError, match="no fp8 weights; set quantize to int8 or int4"):
        load_executor(
            EngineConfig(model=str(BUNDLED_MODEL), quantize="fp8"), lambda _what, _done: None
        )


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "odd": ("Qwen2", {"hidden_size": 60, "intermediate_size": 90, "head_dim": 14}),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Logits near the dense model's with 8 bits, further with 4; batched and chunked bit for bit alike."""
    name, options = FAMILIES[family]
    path = make_reference(tmp_path, name, options).path
    tokens = [(7 * at + 3) % VOCAB for at in range(50)]
    logits = {}
    for form in (None, *FORMATS):
        decoder = load_decoder(
            path,
            read_architecture(path),
            create_cpu_device(1),
            torch.float32,
            lambda _done: None,
            quantize=form,
        )
        runner = Runner(decoder)
        logits[form] = runner.whole(tokens)
        if form is not None:
            runner.forward([("a", tokens[:9])])
            pieces = runner.forward([("b", tokens[20:]), ("a", tokens[9:])])
            assert torch.equal(pieces[1], logits[form][9:])
    spread = logits[None].std()
    off = {form: (logits[form] - logits[None]).square().mean().sqrt() / spread for form in FORMATS}
    assert off["int8"] < 0.1
    assert off["int8"] < off["int4"] < 0.6


def test_the_head_keeps_8_bits_and_routers_stay_dense(tmp_path: Path) -> None:
    path = make_reference(tmp_path, "Mixtral", {"num_local_experts": 4}).path
    decoder = load_decoder(
        path,
        read_architecture(path),
        create_cpu_device(1),
        torch.float32,
        lambda _done: None,
        quantize="int4",
    )
    forms = {
        place.rsplit(".", 1)[-1]: module.weight_format
        for place, module in decoder.named_modules()
        if isinstance(module, Projection)
    }
    assert forms["head"] == "int8"
    assert forms["router"] is None
    assert {forms[name] for name in ("qkv", "o", "gate_up", "down")} == {"int4"}


def test_the_format_is_told_and_is_part_of_the_state() -> None:
    built = {
        form: load_executor(
            EngineConfig(
                model=str(BUNDLED_MODEL), quantize=form, num_blocks=64, warmup=False, threads=1
            ),
            lambda _what, _done: None,
        )
        for form in (None, *FORMATS)
    }
    for form in FORMATS:
        assert f" {form} " in built[form].backend
    assert len({each.fingerprint for each in built.values()}) == 3


@cache
def prompts_scored(form: IntFormat | None) -> list[quality.Prediction]:
    return quality.predictions(BUNDLED_MODEL, quality.held_out(2000), form)


@pytest.mark.parametrize(
    ("form", "ratio", "agreement"), [("int8", 1.01, 0.97), ("int4", 1.02, 0.95)]
)
def test_quality_on_the_bundled_model(form: IntFormat, ratio: float, agreement: float) -> None:
    """The gate: perplexity on text that the model was not trained on, and its likeliest tokens."""
    reference, found = prompts_scored(None), prompts_scored(form)
    assert quality.perplexity(found) < ratio * quality.perplexity(reference)
    assert quality.agreement(found, reference) >= agreement
