"""Checkpoints: location, configuration, weights, and errors that name the problem and the remedy."""

from __future__ import annotations

import json
import math
import re
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
    tensor_files,
)
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.loading.model_selection import summarize_model
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


def load_model(path: Path) -> Decoder:
    return load_checkpoint(path)


def split_into_shards(path: Path) -> dict[str, str]:
    """Split the model into two files with an index, and return the index's map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, shard_names in parts.items():
        save_file({name: tensors[name] for name in shard_names}, path / file)
    index = {name: file for file, shard_names in parts.items() for name in shard_names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def test_directory_is_resolved_to_itself(model: Path) -> None:
    assert resolve_model_path(str(model), None) == model
    load_model(model)


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


def test_sharded_checkpoint_is_loaded(model: Path) -> None:
    index = split_into_shards(model)
    assert {name: file.name for name, file in tensor_files(model).items()} == index
    load_model(model)


def test_missing_shard_is_reported(model: Path) -> None:
    split_into_shards(model)
    (model / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks two\.safetensors"):
        load_model(model)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_invalid_index_is_reported(model: Path, content: str) -> None:
    split_into_shards(model)
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_model(model)


def test_tensor_missing_in_its_shard_is_reported(model: Path) -> None:
    index = split_into_shards(model)
    index["model.norm.weight"] = "one.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight from .*one\.safetensors"):
        load_model(model)


def test_missing_tensor_is_reported(model: Path) -> None:
    tensors = create_tensors()
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor .*model\.layers\.1\.self_attn\.k_proj"):
        load_model(model)


@pytest.mark.parametrize(
    "shape",
    [(16, 31), (17, 32), (16, 32, 1), (16,), ()],
    ids=lambda shape: f"{len(shape)} dims" if len(shape) != 2 else f"{shape[0]}x{shape[1]}",
)
def test_tensor_of_wrong_shape_is_reported(model: Path, shape: tuple[int, ...]) -> None:
    tensors = create_tensors() | {"model.layers.0.self_attn.v_proj.weight": torch.zeros(shape)}
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"self_attn\.v_proj\.weight \[.*model\.safetensors"):
        load_model(model)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.bias",
    ],
)
def test_tensor_that_the_architecture_does_not_read_is_refused(model: Path, name: str) -> None:
    save_file(create_tensors() | {name: torch.ones(32)}, model / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} .*model\.safetensors.*config\.json"):
        load_model(model)


def test_many_unread_tensors_are_counted(model: Path) -> None:
    extra = {f"model.layers.{layer}.sinks": torch.ones(4) for layer in range(30)}
    save_file(create_tensors() | extra, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.sinks.* and 22 others"):
        load_model(model)


def test_known_unneeded_tensors_are_logged(model: Path) -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(create_tensors() | {buffer: torch.ones(4)}, model / "model.safetensors")
    with structlog.testing.capture_logs() as logs:
        load_model(model)
    (event,) = [entry for entry in logs if entry["event"] == "checkpoint_loaded"]
    assert event["unused_tensors"] == [buffer]
    assert (event["architecture"], event["head"]) == ("LlamaForCausalLM", "separate")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.layers.0.input_layernorm"]
)
def test_weight_that_is_not_finite_is_refused(model: Path, name: str, value: float) -> None:
    tensors = create_tensors()
    tensors[f"{name}.weight"].view(-1)[-1] = value
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: {re.escape(name)}.*not finite"):
        load_model(model)


def test_weight_beyond_float16_is_refused(model: Path) -> None:
    save_file(
        create_tensors() | {"lm_head.weight": torch.full((40, 32), 1e5)},
        model / "model.safetensors",
    )
    load_model(model)
    with pytest.raises(ValueError, match=r"lm_head\.weight .*float16.*bfloat16"):
        load_checkpoint(model, torch.float16)


def test_single_file_is_preferred_to_an_index_as_in_transformers(model: Path) -> None:
    single = (model / "model.safetensors").read_bytes()
    split_into_shards(model)
    (model / "model.safetensors").write_bytes(single)
    assert {file.name for file in tensor_files(model).values()} == {"model.safetensors"}


def test_quantized_tensor_is_rejected(model: Path) -> None:
    tensors = create_tensors() | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as torch\.int8"):
        load_model(model)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1])
def test_truncated_file_is_reported(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors.*fetch it again"):
        load_model(model)


def test_archive_that_is_not_one_is_rejected_with_remedy(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin: it is not a zip archive.*safetensors"
    ):
        load_model(model)


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
    ],
    ids=lambda value: str(value)[:80],
)
def test_unsupported_config_is_rejected(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_unreadable_config_is_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_architecture(tmp_path)


def test_architecture_contains_sizes_and_token_ids(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(tmp_path))
    assert (
        architecture.num_layers,
        architecture.num_heads,
        architecture.num_kv_heads,
        architecture.head_dim,
    ) == (2, 4, 2, 8)
    assert (architecture.max_model_len, architecture.eos_token_ids, architecture.bos_token_id) == (
        64,
        (7,),
        None,
    )
    assert architecture.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2
    assert architecture.dtype == "bfloat16"


@pytest.mark.parametrize(("eos_token_id", "ids"), [([3, 4], (3, 4)), (3, (3,)), (None, (7,))])
def test_generation_config_overrides_eos_token_ids(
    tmp_path: Path, eos_token_id: object, ids: tuple[int, ...]
) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    assert read_architecture(tmp_path).eos_token_ids == ids


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
    summary = summarize_model(read_architecture(tmp_path), dtype_bytes=2)
    assert round(summary.num_parameters / 1e9, 2) == published["billion_parameters"]
    assert round(summary.num_active_parameters / 1e9, 2) == published["billion_active_parameters"]
    assert summary.kv_bytes_per_token == published["kv_bytes_per_token"]


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; it must be 7.0"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func .* must be sigmoid"),
        ("DeepseekV3", {"topk_method": "greedy"}, "topk_method .* must be noaux_tc"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob .* must be false"),
        ("DeepseekV3", {"n_group": 5, "topk_group": 2}, "n_group .* divisor of the 8 experts"),
        ("DeepseekV3", {"n_group": 4, "topk_group": 1}, "topk_group .* enough groups for 3"),
        ("DeepseekV3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (
            "DeepseekV3",
            {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"]},
            "mlp_layer_types .* times dense or sparse",
        ),
    ],
)
def test_unsupported_experts_are_rejected_by_key(
    tmp_path: Path, architecture: str, change: dict[str, object], message: str
) -> None:
    write_config(
        tmp_path,
        architectures=[f"{architecture}ForCausalLM"],
        **({"n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3} | change),
    )
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


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
