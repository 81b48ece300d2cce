"""Quantized checkpoints: values equal to those of independent writers, whole models, and equal bits in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.cli.models import compute_model_fit
from argosy.engine.engine_config import EngineConfig, QuantizeSetting
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.compressed import CompressedTensor
from argosy.engine.execution.checkpoint_formats.integer_formats import GptqTensor
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.decoders.generic_loader import load_generic_decoder
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.pack_cache import PackCache, open_pack_cache
from argosy.engine.execution.loading.executor_loader import load_executor
from argosy.engine.execution.loading.model_selection import (
    build_transformers_model,
    find_stored_integers,
)
from argosy.engine.execution.loading.weight_loader import create_encoded_linear
from tests.engine.decoder_driver import (
    DecoderDriver,
    assert_stored_integers_match,
    load_checkpoint,
)
from tests.engine.stored_formats import (
    FORMATS,
    mxfp4_experts,
    quantize_checkpoint,
    quantize_experts_to_mxfp4,
    write_checkpoint,
)
from tests.engine.test_families import DELTA_NET, MODELS
from tests.engine.transformers_reference import VOCAB, make_reference

SHAPE = (24, 192)
PROMPTS = [[(7 * i + 3) % VOCAB for i in range(length)] for length in (3, 18, 40)]
MODEL_FORMATS = [
    "gptq act-order",
    "gptq 8 bits",
    "awq",
    "compressed int4",
    "compressed int8",
    "fp8 block",
    "nf4 nested",
]


def dequantize_columns(reader: CheckpointReader, name: str) -> Tensor:
    """Dequantize the native form, with the columns in the order of the input."""
    matrix = reader.find_encoded(StoredPart(name))
    assert matrix is not None
    weight = matrix.read().dequantize()
    order = matrix.column_order()
    return weight if order is None else torch.empty_like(weight).index_copy_(1, order, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_matrix_equals_what_its_writer_stored(tmp_path: Path, name: str) -> None:
    stored_format = FORMATS[name]
    weight = np.random.default_rng(3).normal(size=SHAPE).astype(np.float32)
    tensors, expected = stored_format.encode("layer", weight)
    assert np.abs(expected - weight).max() < (2.0 if "2 bits" in name else 0.8)
    write_checkpoint(tmp_path, stored_format.config, tensors | stored_format.extra)
    reader = CheckpointReader(tmp_path)
    part = StoredPart("layer.weight")
    assert list(reader.files) == ["layer.weight"]
    assert set(reader.ignored) == set(stored_format.extra)
    peak = np.abs(expected).max()
    values = reader.read_tensor((part,), SHAPE).numpy()
    assert np.abs(values - expected).max() <= 1e-6 * peak
    assert (reader.find_encoded(part) is not None) is stored_format.is_native
    if "fp8" in name:
        reader = CheckpointReader(tmp_path, computes_float8=True)
    if stored_format.is_native or "fp8" in name:
        native = dequantize_columns(reader, "layer.weight").numpy()
        assert np.abs(native - expected).max() <= stored_format.tolerance * peak


def test_mxfp4_experts_equal_what_their_writer_stored(tmp_path: Path) -> None:
    """gpt-oss stores experts [E, N, K] in MXFP4, and [E, K, N] in full precision."""
    blocks, scales, expected = mxfp4_experts((2, 6, 64), 5)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    write_checkpoint(tmp_path, {"quant_method": "mxfp4"}, tensors)
    reader = CheckpointReader(tmp_path)
    assert list(reader.files) == ["experts.down_proj"]
    for expert in range(2):
        part = StoredPart("experts.down_proj", expert, is_transposed=True)
        assert np.array_equal(reader.read_tensor((part,), (6, 64)).numpy(), expected[expert])
        matrix = reader.find_encoded(part)
        assert matrix is not None
        assert np.array_equal(matrix.read().dequantize().numpy(), expected[expert])
    whole = reader.read_parts((StoredPart("experts.down_proj"),)).numpy()
    assert np.array_equal(whole, expected.transpose(0, 2, 1))


@pytest.mark.parametrize("name", MODEL_FORMATS)
def test_model_matches_transformers_on_dequantized_weights(tmp_path: Path, name: str) -> None:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2}
    reference = make_reference(tmp_path, "Qwen2", sizes | {"attention_bias": True})
    quantize_checkpoint(reference, FORMATS[name])
    with structlog.testing.capture_logs() as logs:
        assert_stored_integers_match(tmp_path, reference, PROMPTS, native_error=0.1)
    *_, event = (entry for entry in logs if entry["event"] == "checkpoint_loaded")
    assert event["stored_format"].startswith(FORMATS[name].config["quant_method"])
    assert any(key.startswith("int") for key in event["matrices"]) is FORMATS[name].is_native


@pytest.mark.parametrize(
    ("family", "native_error"), [("GptOss", 0.2), ("Qwen3_5Text", 0.3), ("Qwen3Next", 0.3)]
)
def test_reordered_rows_compute_with_stored_codes(
    tmp_path: Path, family: str, native_error: float
) -> None:
    """The rows of gpt-oss alternate between gate and up. Qwen3-Next stores those of a projection by key head."""
    sizes: dict[str, Any]
    if family == "GptOss":
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        reference = make_reference(tmp_path, family, sizes | {"intermediate_size": 64})
        quantize_experts_to_mxfp4(reference)
    else:
        sizes = DELTA_NET | {"intermediate_size": 128, "mlp_only_layers": [0, 1, 2, 3]}
        reference = make_reference(tmp_path, family, sizes, model=MODELS.get(family, ""))
        quantize_checkpoint(reference, FORMATS["gptq"])
    tolerances: dict[QuantizeSetting | None, float] = {"none": 1e-4, None: native_error}
    for quantize, tolerance in tolerances.items():
        driver = DecoderDriver(load_checkpoint(tmp_path, quantize=quantize))
        for prompt in PROMPTS:
            actual, expected = driver.logits_in_one_chunk(prompt), reference.logits(prompt)
            assert (actual - expected).square().mean().sqrt() < tolerance * expected.std()


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 block"])
def test_model_of_transformers_is_dequantized(tmp_path: Path, name: str) -> None:
    reference = make_reference(tmp_path, "Granite", {"intermediate_size": 128})
    quantize_checkpoint(reference, FORMATS[name])
    model = build_transformers_model(tmp_path, torch.float32)
    decoder = load_generic_decoder(model, create_cpu_device(1), torch.float32, lambda _: None)
    logits = DecoderDriver(decoder).logits_in_one_chunk(PROMPTS[1])
    torch.testing.assert_close(logits, reference.logits(PROMPTS[1]), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["gptq act-order", "compressed int4", "mixed"])
def test_packed_form_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A second start maps the packed integers, and does not read the checkpoint's values."""
    reference = make_reference(tmp_path, "Llama", {"intermediate_size": 128})
    quantize_checkpoint(reference, FORMATS["gptq" if name == "mixed" else name])
    if name == "mixed":  # the rows of q, k and v are in different forms, and so are neighbours
        tensors = load_file(tmp_path / "model.safetensors")
        prefix = "model.layers.0.self_attn.k_proj"
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{prefix}.{part}"]
        tensors[f"{prefix}.weight"] = reference.model.state_dict()[f"{prefix}.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    logits = []
    for _ in range(2):
        with open_pack_cache(("a", name), required_bytes=1 << 20, limit_bytes=1 << 30) as cache:
            decoder = load_checkpoint(tmp_path, torch.bfloat16, pack_cache=cache)
            is_stored = cache.is_stored
        logits.append(DecoderDriver(decoder).logits_in_one_chunk(PROMPTS[1]))
        monkeypatch.setattr(GptqTensor, "read_codes", None)
        monkeypatch.setattr(CompressedTensor, "read_codes", None)
    assert is_stored
    assert torch.equal(*logits)


def test_quantized_checkpoint_is_part_of_the_identity(tmp_path: Path) -> None:
    reference = make_reference(tmp_path, "Llama", {"intermediate_size": 128})
    quantize_checkpoint(reference, FORMATS["gptq"])
    loaded = [
        load_executor(
            EngineConfig(
                model=str(tmp_path), quantize=quantize, num_blocks=8, warmup=False, threads=1
            ),
            lambda *_: None,
        )
        for quantize in (None, "none", "int8")
    ]
    assert "gptq, 4 bits" in loaded[0].backend
    identities = [executor.arithmetic for executor in loaded]
    assert [each.quantization for each in identities] == ["gptq, 4 bits", "none", "int8"]
    assert len({each.id for each in identities}) == 3
    assert len({executor.fingerprint for executor in loaded}) == 3
    assert " int8 " in loaded[2].backend
    architecture = read_architecture(tmp_path)
    plain = compute_model_fit(tmp_path, architecture, "auto", 1 << 30)
    fit = compute_model_fit(
        tmp_path, architecture, "auto", 1 << 30, find_stored_integers(tmp_path, architecture)
    )
    assert fit.stored_format == "gptq, 4 bits"
    assert fit.weight_bytes < 0.6 * plain.weight_bytes


@pytest.mark.parametrize("is_mixed", [False, True])
def test_rows_are_reordered(tmp_path: Path, is_mixed: bool) -> None:
    """Outputs in another order than the checkpoint's rows, as of the experts of gpt-oss, with one format or two."""
    weights = np.random.default_rng(4).normal(size=(2, *SHAPE)).astype(np.float32)
    formats = [FORMATS["gptq"], FORMATS["gptq v2"] if is_mixed else FORMATS["gptq"]]
    tensors = dict[str, Any]()
    for name, weight, stored_format in zip("ab", weights, formats, strict=True):
        tensors |= stored_format.encode(name, weight)[0]
    write_checkpoint(tmp_path, FORMATS["gptq"].config, tensors)
    reader, parts = CheckpointReader(tmp_path), [StoredPart("a.weight"), StoredPart("b.weight")]
    bias, x = torch.randn(2 * SHAPE[0]), torch.randn(5, SHAPE[1])
    order = torch.randperm(2 * SHAPE[0])
    outputs = []
    for row_order in (None, order):
        compute, row_formats = create_encoded_linear(
            reader,
            parts,
            bias,
            create_cpu_device(1),
            dtype=torch.float32,
            pack_cache=PackCache(),
            pack_key="a",
            row_order=None if row_order is None else row_order.tolist(),
        )
        assert len(row_formats) == 1 + is_mixed
        outputs.append(compute(x))
    assert torch.equal(outputs[0][:, order], outputs[1])
