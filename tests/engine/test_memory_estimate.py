"""Memory estimate: its size against loaded models, and what the refusal of a model proposes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from argosy import machine_resources as resources
from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.architectures.architecture import arrange_layers
from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture, ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import StoredIntegers
from argosy.engine.execution.loading.executor_loader import load_executor
from argosy.engine.execution.loading.memory import (
    MemoryNeeds,
    check_memory,
    resolve_limits,
    step_limits,
)
from argosy.models import BUNDLED_MODEL

GIB = 1 << 30


@pytest.fixture(scope="module")
def large() -> ModelArchitecture:
    """Architecture of 8 billion parameters and a context of 131,072 tokens, like Llama 3.1 8B."""
    small = read_architecture(BUNDLED_MODEL)
    return replace(
        small,
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_model_len=131_072,
        tied_embeddings=False,
        layer_architectures=small.layer_architectures * 4,
        ropes=(replace(small.ropes[0], rotary_dim=128),),
    )


def needs(architecture: ModelArchitecture, **settings: object) -> MemoryNeeds:
    return MemoryNeeds(architecture, EngineConfig(model="m", **settings), 2, 2)  # type: ignore[arg-type]


def test_estimate_counts_weights_and_kv_cache(large: ModelArchitecture) -> None:
    estimate = needs(large).estimate()
    assert estimate.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert estimate.kv_bytes == 1024 * 2 * 32 * 8 * 128 * 2
    assert needs(large, num_blocks=10).estimate().kv_bytes == 10 * 16 * 2 * 32 * 8 * 128 * 2
    assert needs(large, kv_memory_bytes=GIB).estimate().kv_bytes == GIB
    assert needs(large, quantize="int8").estimate().weight_bytes == pytest.approx(8.7e9, rel=0.02)
    assert needs(large, quantize="int4").estimate().weight_bytes == pytest.approx(5.3e9, rel=0.05)
    layers = large.num_parameters - 2 * large.vocab_size * large.hidden_size
    stored = StoredIntegers("awq, 4 bits", num_weights=layers, num_bytes=layers * 9 // 16)
    quantized = replace(needs(large), stored=stored)
    assert quantized.estimate().weight_bytes == pytest.approx(6.0e9, rel=0.02)
    dequantized = replace(needs(large, quantize="none"), stored=stored).estimate()
    assert dequantized.weight_bytes == estimate.weight_bytes


@pytest.mark.parametrize(
    ("windows", "max_model_len", "groups", "layers_per_block"),
    [
        ([1024, 1024, 1024, 1024, 1024, None] * 5 + [1024] * 4, 131_072, (None, *[1024] * 6), 5),
        ([128, None] * 12, 131_072, (None, 128), 12),
        ([512, 4096, None], 8192, (None, 4096, 512), 1),
        ([None] * 27 + [4096], 32_768, (None,), 28),  # a block of one layer would need 28 groups
        ([4096] * 32, 32_768, (4096,), 32),
        ([4096] * 32, 4096, (None,), 32),
    ],
    ids=["gemma 3", "gpt-oss", "two windows", "one windowed layer", "all windowed", "long window"],
)
def test_layers_are_arranged_by_windows(
    windows: list[int | None],
    max_model_len: int,
    groups: tuple[int | None, ...],
    layers_per_block: int,
) -> None:
    layout = arrange_layers(tuple(windows), max_model_len)
    assert (layout.windows, layout.layers_per_block) == (groups, layers_per_block)
    assert len(set(layout.places)) == len(windows), "two layers share a place"
    for window, place in zip(windows, layout.places, strict=True):
        assert groups[place.group] in (None, window)
        assert place.layer < layers_per_block


def test_windowed_layers_need_less_memory(large: ModelArchitecture) -> None:
    layers = [
        replace(layer, sliding_window=128 if number % 2 else None)
        for number, layer in enumerate(large.layer_architectures)
    ]
    windowed = replace(large, layer_architectures=tuple(layers))
    per_layer = 16 * 2 * 8 * 128 * 2
    """Bytes of 16 tokens in a layer."""
    assert needs(windowed).estimate().kv_bytes == 16 * (1024 // 16 + 128 // 16 + 2) * per_layer
    assert needs(windowed, num_blocks=10).estimate().kv_bytes == 10 * 16 * per_layer
    rounded = replace(needs(windowed, kv_dtype="int8", num_blocks=10), kv_dtype_bytes=1)
    assert rounded.estimate().kv_bytes == 10 * 16 * per_layer * (128 + 4) // 256
    assert windowed.kv_bytes_per_sequence(2) == 16 * (131_072 // 16 + 128 // 16 + 2) * per_layer

    def max_model_len(architecture: ModelArchitecture, draft_block_bytes: int = 0) -> int:
        layout = architecture.kv_layout
        config = EngineConfig(model="m", kv_memory_bytes=GIB)
        limits = resolve_limits(
            config,
            step_limits(
                config, max_model_len=architecture.max_model_len, kv_windows=layout.windows
            ),
            block_bytes=layout.block_bytes(architecture.kv_bytes_per_token(2), 16),
            draft_block_bytes=draft_block_bytes,
            free_bytes=0,
            kv_memory_fraction=0.0,
        )
        assert limits.kv_capacity_tokens >= limits.max_model_len
        return limits.max_model_len

    assert max_model_len(large) == GIB // (32 * per_layer) * 16
    assert max_model_len(large, 8 * per_layer) == GIB // (40 * per_layer) * 16
    assert max_model_len(windowed) == (GIB // (16 * per_layer) - 10) * 16


def test_recurrent_states_leave_less_memory_for_the_kv_cache(large: ModelArchitecture) -> None:
    """Every sequence has a state, and snapshots share the memory of the KV cache."""
    net = DeltaNetArchitecture(16, 32, 128, 128, 4)
    layers = [
        replace(layer, is_recurrent=index % 4 < 3)
        for index, layer in enumerate(large.layer_architectures)
    ]
    hybrid = replace(large, layer_architectures=tuple(layers), delta_net=net)
    state_bytes = 24 * (32 * 128 * 128 + 3 * 64 * 128) * 4
    assert hybrid.state_bytes == state_bytes
    assert needs(hybrid, max_seqs=10).estimate().state_bytes == 10 * state_bytes
    assert hybrid.kv_bytes_per_token(2) == large.kv_bytes_per_token(2) // 4
    with pytest.raises(ValueError, match=r"recurrent states 3\.\d* GiB.*--max-seqs 8"):
        check_memory(needs(hybrid), 18 * GIB, ())

    def resolve(**settings: object) -> tuple[int, int | None]:
        layout = hybrid.kv_layout
        config = EngineConfig(model="m", max_seqs=4, **settings)  # type: ignore[arg-type]
        limits = resolve_limits(
            config,
            step_limits(config, max_model_len=hybrid.max_model_len, kv_windows=layout.windows),
            block_bytes=layout.block_bytes(hybrid.kv_bytes_per_token(2), 16),
            state_bytes=state_bytes,
            free_bytes=4 * state_bytes + 2 * GIB,
            kv_memory_fraction=0.5,
        )
        return limits.num_blocks, limits.state_snapshots

    block_bytes = 8 * 16 * 2 * 8 * 128 * 2
    snapshots = GIB // 2 // state_bytes
    assert resolve() == ((GIB - snapshots * state_bytes) // block_bytes, snapshots)
    assert resolve(prefix_cache=False) == (GIB // block_bytes, 0)
    assert resolve(kv_memory_bytes=8 * GIB)[1] == 16  # more are of no use


def test_weights_of_the_bundled_model_are_counted() -> None:
    stored = sum(t.numel() for t in load_file(BUNDLED_MODEL / "model.safetensors").values())
    architecture = read_architecture(BUNDLED_MODEL)
    head = architecture.vocab_size * architecture.hidden_size
    assert needs(architecture).estimate().weight_bytes == 2 * (stored + head)


@pytest.mark.parametrize(
    ("free_gib", "settings", "proposals"),
    [
        (20, {}, None),
        (12, {}, ["--quantize int8"]),
        (8, {}, ["--quantize int4"]),
        (20, {"kv_memory_bytes": 30 * GIB}, ["--kv-memory 4694MiB"]),
        (6, {"kv_memory_bytes": 30 * GIB}, ["--quantize int4 --kv-memory 523MiB"]),
        (1, {}, []),
    ],
)
def test_refusal_names_settings_that_fit(
    large: ModelArchitecture,
    free_gib: int,
    settings: dict[str, object],
    proposals: list[str] | None,
) -> None:
    required = needs(large, **settings)
    if proposals is None:
        check_memory(required, free_gib * GIB, ("int8", "int4"))
        return
    with pytest.raises(ValueError, match=rf"but {free_gib} GiB are free") as caught:
        check_memory(required, free_gib * GIB, ("int8", "int4"))
    assert re.findall(r"(?:--[a-z-]+ \S+ ?)+(?= \()", str(caught.value))[:1] == proposals
    if not proposals:
        assert "machine with more memory" in str(caught.value)


def test_enormous_context_is_refused_with_a_smaller_one(large: ModelArchitecture) -> None:
    required = needs(replace(large, max_model_len=2**31 - 1))
    with pytest.raises(ValueError, match="it fits with --max-model-len 32768"):
        check_memory(required, 20 * GIB, ("int8",))


def test_model_that_does_not_fit_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "free_bytes", lambda: 8 << 20)
    progress: list[str] = []
    config = EngineConfig(model=str(BUNDLED_MODEL), device="cpu", threads=1)
    with pytest.raises(ValueError, match=r"the model needs .* but 8 MiB are free"):
        load_executor(config, lambda activity, _: progress.append(activity))
    assert "loading weights" not in progress
    assert torch.get_num_threads() == 1
