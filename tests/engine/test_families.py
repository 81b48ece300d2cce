"""Every family against transformers: the same logits and the same greedy text from one checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.device import create_cpu_device
from argosy.engine.execution.model_architecture import summarize_model
from argosy.engine.execution.weight_loader import load_decoder
from tests.engine.decoder_driver import Runner
from tests.engine.transformers_reference import VOCAB, Reference, make_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from argosy.engine.execution.decoder import Decoder
    from argosy.engine.execution.model_architecture import ModelArchitecture

LENGTHS = (1, 2, 5, 16, 17, 33, 70)

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "partial_rotary_factor": 0.75,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen 2": ("Qwen2", {}),
    "qwen 2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen 3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral without windows": ("Mistral", {"sliding_window": None}),
    "gemma 2": ("Gemma2", GEMMA | {"tie_word_embeddings": False}),
    "gemma 3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7}),
    "phi 3": ("Phi3", {"sliding_window": 12}),
    "phi 3 partial": ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "olmo 2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen 3 moe": ("Qwen3Moe", MOE | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen 3 moe with dense layers": (
        "Qwen3Moe",
        MOE | {"num_experts": 4, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}
MODELS = {"Gemma3Text": "Gemma3ForCausalLM"}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
    "llama3": LLAMA_3,
    "yarn": YARN | {"original_max_position_embeddings": 64},
    "yarn, original by default": YARN,
    "yarn, attention factor": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, not truncated": YARN
    | {"truncate": False, "original_max_position_embeddings": 64, "factor": 4.0},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    def build(family: str, options: dict[str, Any], **how: Any) -> Reference:  # noqa: ANN401
        path = tmp_path_factory.mktemp(family)
        return make_reference(path, family, options, model=MODELS.get(family, ""), **how)

    return build


def load(
    path: Path, spec: ModelArchitecture | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    return load_decoder(
        path, spec or read_architecture(path), create_cpu_device(1), dtype, lambda _: None
    )


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def check_logits(reference: Reference, runner: Runner, lengths: tuple[int, ...] = LENGTHS) -> None:
    for prompt in prompts(lengths):
        assert_close(runner.whole(prompt), reference.logits(prompt))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_computes_what_transformers_does(make: Callable[..., Reference], name: str) -> None:
    family, options = FAMILIES[name]
    reference = make(family, options)
    runner = Runner(load(reference.path))
    given = prompts()
    alone = [runner.whole(prompt) for prompt in given]
    for prompt, logits in zip(given, alone, strict=True):
        assert_close(logits, reference.logits(prompt))

    together = runner.forward([(f"t{i}", prompt) for i, prompt in enumerate(given)])
    for mine, batched in zip(alone, together, strict=True):
        assert torch.equal(batched, mine)

    longest = given[-1]
    pieces = [longest[:1], longest[1:9], longest[9:41], longest[41:]]
    parts = [runner.forward([("n", [7]), ("c", piece)])[1] for piece in pieces]
    assert torch.equal(torch.cat(parts), alone[-1])

    few = [given[1], given[3], given[6]]
    expected = [reference.greedy(prompt, 24) for prompt in few]
    assert runner.greedy(few, 24) == expected
    assert runner.greedy(few, 24, chunk=5) == expected
    if not reference.model.config.tie_word_embeddings:  # tied random models repeat themselves
        assert len({token for tokens in expected for token in tokens}) > 5


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(make: Callable[..., Reference], name: str) -> None:
    reference = make("Llama", {"rope_parameters": ROPES[name]})
    check_logits(reference, Runner(load(reference.path)), (1, 33, 70, 200))


@pytest.mark.parametrize(("max_len", "lengths"), [(32, (1, 17, 32)), (256, (33, 70, 200))])
def test_longrope_takes_its_factors_by_the_context_served(
    make: Callable[..., Reference], max_len: int, lengths: tuple[int, ...]
) -> None:
    reference = make("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32})
    spec = replace(read_architecture(reference.path), max_model_len=max_len)
    check_logits(reference, Runner(load(reference.path, spec)), lengths)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_transformers_4_writes_ropes_otherwise(make: Callable[..., Reference], name: str) -> None:
    reference = make("Llama", {"rope_parameters": ROPES[name]})
    new = read_architecture(reference.path)

    def age(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype")

    rewrite(reference.path, age)
    assert read_architecture(reference.path) == new


@pytest.mark.parametrize("name", ["qwen 2 with windows", "gemma 2", "mistral", "qwen 3 moe"])
def test_transformers_4_leaves_the_kinds_of_layers_to_the_family(
    make: Callable[..., Reference], name: str
) -> None:
    reference = make(*FAMILIES[name])
    new = read_architecture(reference.path)
    rewrite(reference.path, lambda config: config.pop("layer_types", None))
    assert read_architecture(reference.path) == new


def test_gemma_3_of_transformers_4(make: Callable[..., Reference]) -> None:
    reference = make("Gemma3Text", GEMMA | {"num_hidden_layers": 7})
    new = read_architecture(reference.path)
    assert [layer.sliding_window for layer in new.layer_architectures] == [8, 8, 8, 8, 8, None, 8]
    assert [rope.theta for rope in new.ropes] == [1_000_000.0, 10_000.0]

    def age(config: dict[str, Any]) -> None:
        del config["rope_parameters"], config["layer_types"]
        config |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
        config |= {"sliding_window_pattern": 6, "rope_scaling": None}

    rewrite(reference.path, age)
    assert read_architecture(reference.path) == new


def test_text_part_of_gemma_3_with_images(make: Callable[..., Reference]) -> None:
    reference = make("Gemma3Text", GEMMA)
    expected = reference.logits(prompts()[-1])

    def wrap(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config |= {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}

    rewrite(reference.path, wrap)
    file = reference.path / "model.safetensors"
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = load_file(file)
        renamed = {prefix + name.split("model.")[-1]: tensor for name, tensor in tensors.items()}
        save_file(renamed, file)
        logits = Runner(load(reference.path)).whole(prompts()[-1])
        assert_close(logits, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen 3 moe"])
def test_experts_may_be_stored_in_one_tensor(make: Callable[..., Reference], name: str) -> None:
    reference = make(*FAMILIES[name])
    tensors = load_file(reference.path / "model.safetensors")
    own = reference.model.state_dict()
    assert set(tensors) != set(own)  # transformers splits its fused experts when it saves
    save_file(
        {key: tensor.contiguous() for key, tensor in own.items()},
        reference.path / "model.safetensors",
    )
    check_logits(reference, Runner(load(reference.path)), (1, 33))


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_checkpoints(make: Callable[..., Reference], tied: bool) -> None:
    reference = make("Qwen3", {"tie_word_embeddings": tied}, shard="60KB")
    assert len(list(reference.path.glob("*.safetensors"))) > 3
    told: list[float] = []
    decoder = load_decoder(
        reference.path,
        read_architecture(reference.path),
        create_cpu_device(1),
        torch.float32,
        told.append,
    )
    check_logits(reference, Runner(decoder), (1, 33))
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["llama 3", "gemma 3", "olmo 2", "mixtral"])
def test_bfloat16(make: Callable[..., Reference], name: str) -> None:
    family, options = FAMILIES[name]
    reference = make(family, options, dtype=torch.bfloat16)
    runner = Runner(load(reference.path, dtype=torch.bfloat16))
    reference.model.float()
    for prompt in prompts((1, 33)):
        exact, logits = reference.logits(prompt), runner.whole(prompt)
        assert logits.dtype == torch.float32
        error = (logits - exact).std(-1) / exact.std(-1)  # of each token; routing may flip in some
        assert error.median() < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_description_counts_what_the_checkpoint_holds(
    make: Callable[..., Reference], name: str
) -> None:
    reference = make(*FAMILIES[name])
    held = sum(parameter.numel() for parameter in reference.model.parameters())
    spec = read_architecture(reference.path)
    facts = summarize_model(spec, dtype_bytes=2)
    assert facts.num_parameters == held
    assert facts.weight_bytes == 2 * held
    experts = sum(p.numel() for key, p in reference.model.named_parameters() if ".experts." in key)
    share = spec.moe.num_experts_per_token / spec.moe.num_experts if spec.moe else 1.0
    assert facts.num_active_parameters == held - experts * (1 - share)
    assert facts.kv_bytes_per_token == 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2


def test_no_logits_wanted(make: Callable[..., Reference]) -> None:
    reference = make(*FAMILIES["llama 2"])
    decoder = load(reference.path)
    runner = Runner(decoder, num_blocks=8)
    batch = replace(runner.batch([("a", [1, 2, 3])]), logit_index=torch.empty(0, dtype=torch.long))
    attention = decoder.create_attention(8, 16)
    assert decoder(batch, attention).shape == (0, VOCAB)
