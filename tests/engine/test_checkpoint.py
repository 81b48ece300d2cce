"""Checkpoints: location, configuration, and digests. `test_hostile_checkpoints` has what is refused of their files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from argosy.engine.execution.architectures.checkpoint_tensors import checkpoint_tensor_names
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.architectures.decoder_families import FAMILIES
from argosy.engine.execution.architectures.rope import RopeParams
from argosy.engine.execution.checkpoint_formats.checkpoint import (
    checkpoint_digest,
    resolve_model_path,
)
from tests.engine.decoder_driver import load_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}


LLAMA_3_ROPE = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
GEMMA = {"architectures": ["Gemma2ForCausalLM"]}
EXPERTS = {"n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3}
GPT_OSS, DEEPSEEK_2, DEEPSEEK_3 = (
    EXPERTS | {"architectures": [f"{family}ForCausalLM"]}
    for family in ("GptOss", "DeepseekV2", "DeepseekV3")
)
QWEN_3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}


def write_config(path: Path, **changes: object) -> Path:
    """Write config.json with `changes`. The value ... removes a key."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return path


def create_tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens": (40, 32), "model.norm": (32,), "lm_head": (40, 32)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj": (32, 32),
            f"{prefix}self_attn.k_proj": (16, 32),
            f"{prefix}self_attn.v_proj": (16, 32),
            f"{prefix}self_attn.o_proj": (32, 32),
            f"{prefix}mlp.gate_proj": (48, 32),
            f"{prefix}mlp.up_proj": (48, 32),
            f"{prefix}mlp.down_proj": (32, 48),
            f"{prefix}input_layernorm": (32,),
            f"{prefix}post_attention_layernorm": (32,),
        }
    return {f"{name}.weight": torch.full(shape, 0.01) for name, shape in shapes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file(create_tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/nothing", "no directory"),
        ("./nothing", "no directory"),
        ("{}", "no config.json"),
        ("{}/file", "give the directory"),
        ("a/b/c", "no directory"),
        ("not a name!", "owner/model"),
    ],
)
def test_invalid_model_path_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        resolve_model_path(name.format(tmp_path), None)


def test_known_unneeded_tensors_are_logged(model: Path) -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(create_tensors() | {buffer: torch.ones(4)}, model / "model.safetensors")
    with structlog.testing.capture_logs() as logs:
        load_checkpoint(model)
    (event,) = [entry for entry in logs if entry["event"] == "checkpoint_loaded"]
    assert event["unused_tensors"] == [buffer]
    assert (event["architecture"], event["head"]) == ("LlamaForCausalLM", "separate")


def test_weight_beyond_float16_is_refused(model: Path) -> None:
    save_file(
        create_tensors() | {"lm_head.weight": torch.full((40, 32), 1e5)},
        model / "model.safetensors",
    )
    load_checkpoint(model)
    with pytest.raises(ValueError, match=r"lm_head\.weight .*float16.*bfloat16"):
        load_checkpoint(model, torch.float16)


def test_single_file_is_preferred_to_an_index_as_in_transformers(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    load_checkpoint(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "LlamaForCausalLM.*Qwen3MoeForCausalLM"),
        ({"architectures": ...}, "LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits is missing"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3 bits.*use a .*AWQ"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ is not supported; use a .*GPTQ"),
        ({"quantization_config": {"quant_method": "x" * 200}}, "'xxx.* is not supported"),
        ({"quantization_config": {}}, "without quant_method"),
        ({"hidden_act": "relu"}, "'relu' is unknown"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2]}}, "several axes"),
        (QWEN_3_5 | {"layer_types": ["linear_attention"] * 2}, "at least one full_attention"),
        (QWEN_3_5 | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (QWEN_3_5 | {"linear_num_value_heads": 24}, "a multiple of the 16 key heads"),
        (QWEN_3_5 | {"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"use_bidirectional_attention": True}, "cannot generate"),
        # values that cannot be right
        ({"rms_norm_eps": -1e-5}, r"config\.json: rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*finite"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": -1.0}, r"rope_theta is -1\.0"),
        ({"rope_parameters": {"rope_theta": 0.0}}, r"rope_theta is 0\.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": -2}}, "factor is -2"),
        (
            {"rope_scaling": LLAMA_3_ROPE | {"high_freq_factor": 1}},
            "high_freq_factor is 1; it must be a number above 1",
        ),
        ({"rope_scaling": LLAMA_3_ROPE | {"original_max_position_embeddings": -5}}, "original_max"),
        ({"rope_scaling": LONG_ROPE | {"long_factor": [1.0, 0, 1, 1]}}, "long_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 30}, "hidden_size is 30; it must be a multiple of the 4 attention heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"eos_token_id": 40}, "eos_token_id is 40.*below the vocab_size 40"),
        ({"eos_token_id": [7, -1]}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (MIXTRAL | {"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA | {"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30"),
        (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; it must be 7.0"),
        (DEEPSEEK_3 | {"scoring_func": "softmax"}, "scoring_func .* must be sigmoid"),
        (DEEPSEEK_3 | {"topk_method": "greedy"}, "topk_method .* must be noaux_tc"),
        (DEEPSEEK_2 | {"norm_topk_prob": True}, "norm_topk_prob .* must be false"),
        (DEEPSEEK_3 | {"n_group": 5, "topk_group": 2}, "n_group .* divisor of the 8 experts"),
        (DEEPSEEK_3 | {"n_group": 4, "topk_group": 1}, "topk_group .* enough groups for 3"),
        (DEEPSEEK_3 | {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (
            DEEPSEEK_3 | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"]},
            "mlp_layer_types .* times dense or sparse",
        ),
    ],
    ids=lambda value: str(value)[:80],
)
def test_unsupported_config_is_rejected(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


@pytest.mark.parametrize(("eos_token_id", "ids"), [([3, 4], (3, 4)), (3, (3,)), (None, (7,))])
def test_generation_config_overrides_eos_token_ids(
    tmp_path: Path, eos_token_id: object, ids: tuple[int, ...]
) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    assert read_architecture(tmp_path).eos_token_ids == ids


def test_generation_config_hides_no_invalid_eos_token_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": [10**30]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    with pytest.raises(ValueError, match="eos_token_id is"):
        read_architecture(tmp_path)


def test_generation_config_of_another_folder_has_the_eos_token_ids(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_architecture(tmp_path, str(other)).eos_token_ids == (5,)
    assert read_architecture(tmp_path, "none").eos_token_ids == (3,)


def test_yarn_extends_max_model_len(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read_architecture(write_config(tmp_path, rope_scaling=scaling)).max_model_len == 128


@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    layers=st.integers(1, 8),
    pattern=st.integers(1, 4),
    change=st.fixed_dictionaries(
        {},
        optional={
            "use_sliding_window": st.booleans(),
            "sliding_window": st.none() | st.integers(1, 64),
            "max_window_layers": st.integers(0, 8),
            "head_dim": st.sampled_from([8, 16, None]),
            "tie_word_embeddings": st.booleans(),
            "rope_theta": st.sampled_from([100.0, 10_000]),
        },
    ),
)
def test_every_family_reads_valid_configs(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    layers: int,
    pattern: int,
    change: dict[str, object],
) -> None:
    path = tmp_path_factory.mktemp("any", numbered=True)
    write_config(
        path,
        architectures=[architecture],
        num_hidden_layers=layers,
        sliding_window_pattern=pattern,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        full_attention_interval=min(layers, pattern),
        **change,
    )
    parsed = read_architecture(path)
    assert len(parsed.layer_architectures) == layers
    for layer in parsed.layer_architectures:
        assert isinstance(parsed.ropes[layer.rope_index], RopeParams)
        assert layer.sliding_window is None or layer.sliding_window == (
            change.get("sliding_window") or FAMILIES[architecture].defaults["sliding_window"]
        )
    alternatives = checkpoint_tensor_names(parsed, "layers.0.attention.o.weight")
    assert all(name.endswith(".weight") for names in alternatives for name in names)


PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text())
"""config.json of published models, without the values that equal the family's, and the sizes that they state."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    model = read_architecture(tmp_path)
    assert round(model.num_parameters / 1e9, 2) == published["billion_parameters"]
    assert round(model.num_active_parameters / 1e9, 2) == published["billion_active_parameters"]
    assert model.kv_bytes_per_token(2) == published["kv_bytes_per_token"]


def test_configs_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "import argosy.engine.execution.architectures.decoder_config\n"
        "import argosy.engine.execution.checkpoint_formats.checkpoint\n"
        "assert not {'torch', 'safetensors', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digest_depends_on_file_contents_only(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        save_file({"a": torch.ones(300, 100)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        (folder / "notes.md").write_text(folder.name)
    one, two = folders
    assert checkpoint_digest(one) == checkpoint_digest(two)
    weights = load_file(two / "model.safetensors")["a"]
    weights[299, 99] = 2.0
    save_file({"a": weights}, two / "model.safetensors")
    assert checkpoint_digest(one) != checkpoint_digest(two)
    save_file({"a": torch.ones(300, 100)}, two / "model.safetensors")
    (two / "chat_template.jinja").write_text("{{ messages }}")
    assert checkpoint_digest(one) != checkpoint_digest(two)


def test_digest_of_large_file_samples_every_matrix(tmp_path: Path) -> None:
    matrix = 8 << 20
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * matrix)
        before = checkpoint_digest(tmp_path)
        for number in range(16):
            file.seek(number * matrix)
            file.write(b"\1" * matrix)
            file.flush()
            after = checkpoint_digest(tmp_path)
            assert after != before
            before = after
