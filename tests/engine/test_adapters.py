"""Adapters (LoRA): equal to PEFT, independent of the batch, and refused by name where they are not honoured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from argosy.engine.engine_config import QuantizeSetting
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.torch.lora import (
    AdapterWeights,
    TorchRowAdapters,
)
from tests.engine.adapter_files import ATTENTION, MLP, write_adapter
from tests.engine.adapter_updates import draw_updates
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.transformers_reference import Reference, make_reference

ALL = [*ATTENTION, *MLP]
OTHER_FAMILIES = [
    *("qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
]
PROMPT = [*range(3, 40), 9, 3, 77]

# --- PEFT -------------------------------------------------------------------------------------------

PEFT_CASES: dict[str, dict[str, Any]] = {
    "all modules": {"r": 4, "target_modules": ALL},
    "rank 1 of one part": {"r": 1, "target_modules": ["k_proj"], "use_rslora": True},
    "rank 17 and 256": {"r": 17, "target_modules": ALL, "rank_pattern": {"o_proj": 256}},
    "patterns": {
        "r": 4,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 1, "layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"down_proj": 3},
    },
    "some layers": {"r": 4, "target_modules": ALL, "layers_to_transform": [1]},
    "regular expression": {
        "r": 4,
        "target_modules": r".*\.(q|up)_proj",
        "exclude_modules": ".*0.mlp.*",
    },
    "bias": {"r": 4, "target_modules": ALL, "lora_bias": True},
    "dora": {"r": 4, "target_modules": ALL, "use_dora": True},
    "dora of some parts": {"r": 3, "target_modules": ["v_proj", "up_proj"], "use_dora": True},
    "embedding and head": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dora of the embedding": {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True},
    "whole matrices": {
        "r": 4,
        "target_modules": ALL,
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "token rows": {"r": 4, "target_modules": ALL, "trainable_token_indices": [9, 3, 77]},
    "token rows of both": {
        "r": 4,
        "target_modules": ALL,
        "trainable_token_indices": {"embed_tokens": [9, 3, 77], "lm_head": [9, 4]},
    },
}


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        ("qwen 2", False),
        pytest.param("llama 3", True, marks=pytest.mark.exhaustive),
        pytest.param("gemma 3", True, marks=pytest.mark.exhaustive),
        pytest.param("phi 3", False, marks=pytest.mark.exhaustive),
        pytest.param("qwen 3.5", False, marks=pytest.mark.exhaustive),
        pytest.param("deepseek 2", False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers about each other
def test_every_honoured_field_gives_the_logits_of_peft(
    tmp_path: Path, family: str, is_tied: bool
) -> None:
    peft = pytest.importorskip("peft", reason="peft is missing; install the extra dev")
    base = make_family(tmp_path / "base", family, tie_word_embeddings=is_tied)
    driver = DecoderDriver(load_checkpoint(base.path))
    modules = {name for name, _ in base.model.named_modules()}
    for slot, (case, config) in enumerate(PEFT_CASES.items(), 1):
        names = [*ALL, *OTHER_FAMILIES]
        present = [name for name in names if any(path.endswith(f".{name}") for path in modules)]
        if config["target_modules"] == ALL:
            config |= {"target_modules": present}
        wrapped = make_family(tmp_path / "copy", family, tie_word_embeddings=is_tied)
        try:
            model = peft.get_peft_model(
                wrapped.model, peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=12, **config)
            )
        except ValueError:  # the family has none of the modules
            continue
        randomize(model, seed=slot)
        model.eval().save_pretrained(str(tmp_path / case))
        if model.peft_config["default"].target_parameters:
            with pytest.raises(ValueError, match="target_parameters is set"):
                driver.adapters.add(slot, tmp_path / case)
            continue
        driver.adapters.add(slot, tmp_path / case)
        driver.slots[case] = slot
        (logits,) = driver.forward([(case, PROMPT)])
        expected = Reference(base.path, model).logits(PROMPT)
        assert (expected - base.logits(PROMPT)).abs().max() > 0.1, case
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4, msg=case)


def make_family(path: Path, family: str, **options: object) -> Reference:
    name, family_options = FAMILIES[family]
    return make_reference(path, name, family_options | options, model=MODELS.get(name, ""))


def randomize(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = 0.1 * torch.randn_like(parameter)
            parameter.data += noise * parameter.data if "magnitude" in name else noise


# --- independence of the batch ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "quantize"),
    [
        ("qwen 2", torch.bfloat16, None),
        ("qwen 2", torch.float32, None),
        pytest.param("qwen 2", torch.bfloat16, "int8", marks=pytest.mark.exhaustive),
        pytest.param("qwen 2", torch.bfloat16, "int4", marks=pytest.mark.exhaustive),
        pytest.param("gpt-oss", torch.bfloat16, None, marks=pytest.mark.exhaustive),
        pytest.param("qwen 3.5", torch.bfloat16, None, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_do_not_depend_on_other_rows_and_their_adapters(
    tmp_path: Path, isa: str, family: str, dtype: torch.dtype, quantize: QuantizeSetting | None
) -> None:
    base = make_family(tmp_path / "base", family, tie_word_embeddings=False)
    driver = DecoderDriver(load_checkpoint(base.path, dtype, quantize=quantize))
    prompts = [list(range(3, 3 + size)) for size in (1, 5, 23, 40)]
    without = [driver.logits_in_one_chunk(prompt) for prompt in prompts]
    folders = [
        write_adapter(tmp_path / "plain", base.path, rank=8, seed=1),
        write_adapter(tmp_path / "dora", base.path, rank=17, seed=2, use_dora=True),
        write_adapter(
            tmp_path / "both ends", base.path, ["q_proj", "embed_tokens", "lm_head"], seed=3
        ),
    ]
    for slot, folder in enumerate(folders, 1):
        assert driver.adapters.add(slot, folder) > 0

    alone: dict[tuple[int, int], Tensor] = {}
    for slot in range(4):
        for number, prompt in enumerate(prompts):
            name = f"alone {slot} {number}"
            driver.slots[name] = slot
            (alone[slot, number],) = driver.forward([(name, prompt)])
            driver.release(name)
    assert all(torch.equal(alone[0, number], logits) for number, logits in enumerate(without))
    assert all(not torch.equal(alone[slot, 3], without[3]) for slot in (1, 2, 3))
    keys = sorted(alone, key=lambda key: (key[1], key[0] * 7 % 4))
    for size in (40, 4, 1):  # in one chunk, in chunks, and one token after the other
        names = {key: f"together {size} {key}" for key in keys}
        driver.slots.update({name: key[0] for key, name in names.items()})
        parts: dict[tuple[int, int], list[Tensor]] = {key: [] for key in keys}
        for start in range(0, 40, size):
            chunks = [
                (key, prompts[key[1]][start : start + size])
                for key in keys
                if prompts[key[1]][start : start + size]
            ]
            outputs = driver.forward([(names[key], tokens) for key, tokens in chunks])
            for (key, _), logits in zip(chunks, outputs, strict=True):
                parts[key].append(logits)
        for key in keys:
            assert torch.equal(torch.cat(parts[key]), alone[key]), (size, key)
            driver.release(names[key])
    driver.adapters.remove(1)
    with pytest.raises(ValueError, match="no adapter is loaded in slot 1"):
        driver.forward([("alone 1 0", [3])])


def test_kernel_equals_torch_for_any_ranks_and_sizes(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    device = create_cpu_device(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for dtype, ranks, cols, splits in (
        (torch.bfloat16, (1,), 33, ((0, 50),)),
        (torch.bfloat16, (8, 17), 64, ((0, 7), (7, 40))),
        (torch.bfloat16, (3, 256), 896, ((16, 17), (60, 800))),
        (torch.float32, (5, 33), 31, ((0, 16), (40, 3), (43, 20))),
        (torch.float16, (4,), 32, ((0, 16),)),
    ):
        outs = 1000
        updates = draw_updates(generator, dtype, ranks, cols, splits, outs)
        adapters = [AdapterWeights({2: update}) for update in updates]
        x = draw(40, 2 * cols).to(dtype)[:, ::2]
        before = draw(40, outs).to(dtype)
        before[:, ::3] = -0.0  # to which a base row must not add 0
        rows, starts = torch.randperm(40, generator=generator)[:23], torch.tensor([0, 14, 23])
        expected, actual = before.clone(), before.clone()
        TorchRowAdapters(adapters, rows, starts).update_linear(2, x, expected)
        packed = [device.create_adapter(adapter, 4, dtype) for adapter in adapters]
        assert all(adapter.num_bytes > 0 for adapter in packed)
        row_adapters = device.create_row_adapters(packed, rows, starts, dtype)
        row_adapters.update_linear(2, x, actual)
        row_adapters.update_linear(3, x, actual)  # which no adapter changes
        untouched = torch.ones(40, outs, dtype=torch.bool)
        for first, size in splits:
            untouched[rows, first : first + size] = False
        assert torch.equal(actual[untouched], before[untouched])
        assert actual[untouched].signbit().equal(before[untouched].signbit())
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)


# --- refusals ---------------------------------------------------------------------------------------

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG_REFUSALS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"r": 0}, "r is 0"),
    ({"r": 10**30}, "r is 1000"),
    ({"r": True}, "r is True"),
    ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
    ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
    ({"use_qalora": True}, "use_qalora is set"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
    ({"velora_config": {"x": 1}}, "velora_config is set"),
    ({"kasa_config": {"x": 1}}, "kasa_config is set"),
    ({"monteclora_config": {"x": 1}}, "monteclora_config is set"),
    ({"arrow_config": {"x": 1}}, "arrow_config is set"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is set"),
    ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "new"}, "init_lora_weights is 'new'"),
    ({"use_dora": True, "lora_bias": True}, "use_dora and lora_bias"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"use_something": True}, "the field 'use_something' is not known"),
    ({"rank_pattern": {"(": 4}}, r"rank_pattern has the pattern '\(\?:\.\*"),
    ({"rank_pattern": {"q_proj": 513}}, "rank_pattern.*513"),
    ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern.*nan"),
    ({"target_modules": r"(?<=x)q_proj"}, "target_modules has the pattern"),
    ({"target_modules": ["v_proj"]}, "layers.0.self_attn.q_proj has tensors, but"),
    ({"target_modules": ["q_proj", "v_proj"]}, "layers.0.self_attn.v_proj is one of the target"),
    ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj has tensors, but"),
    ({"exclude_modules": ["q_proj"]}, "layers.0.self_attn.q_proj has tensors, but"),
    ({"r": 5}, r"lora_A \[4, 64\] and lora_B \[64, 4\] instead of \[5, 64\]"),
    ({"use_dora": True}, "q_proj and use_dora do not agree"),
    ({"lora_bias": True}, "q_proj and lora_bias do not agree"),
    ({"modules_to_save": ["lm_head"]}, "lm_head is in modules_to_save or"),
    ({"modules_to_save": ["score"]}, "names 'score'"),
    ({"trainable_token_indices": [3]}, "embed_tokens is in modules_to_save or"),
    ({"trainable_token_indices": [3, 3]}, "trainable_token_indices of 'embed_tokens'"),
]
TENSOR_REFUSALS: list[tuple[dict[str, Tensor], dict[str, object], str]] = [
    ({f"{QUERY}.lora_A.weight": torch.full((4, 64), torch.nan)}, {}, "q_proj.* not finite"),
    ({f"{QUERY}.lora_A.weight": torch.ones(4, 64).to(torch.int32)}, {}, "stored as torch.int32"),
    ({f"{QUERY}.lora_B.weight": torch.ones(65, 4)}, {}, r"lora_B \[65, 4\]"),
    (
        {f"{QUERY}.lora_B.weight": torch.full((64, 4), 1e38)},
        {"lora_alpha": 1e6},
        "beyond the range",
    ),
    ({f"{QUERY}.lora_C.weight": torch.ones(4, 64)}, {}, "q_proj.lora_C is no module"),
    ({"q_proj.weight": torch.ones(4, 64)}, {}, "'q_proj.weight', which is not known"),
    ({f"{QUERY}.weight": torch.ones(64, 64)}, {}, "q_proj has a whole matrix"),
    ({"base_model.model.model.norm.weight": torch.ones(64)}, {}, "norm is no module of Qwen2"),
    (
        {"base_model.model.model.layers.0.mlp.experts.1.down_proj.lora_A.weight": torch.ones(4, 4)},
        {},
        "mlp.experts.1.down_proj belongs to a mixture of experts",
    ),
    (
        {"base_model.model.model.layers.0.self_attn.kv_b_proj.lora_A.weight": torch.ones(4, 4)},
        {},
        "kv_b_proj is absorbed",
    ),
    (
        {"base_model.model.lm_head.weight": torch.ones(161, 64)},
        {"modules_to_save": ["lm_head"]},
        "cannot change the vocabulary",
    ),
    (
        {
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(
                1, 64
            )
        },
        {"trainable_token_indices": [160]},
        "embed_tokens has rows",
    ),
    (
        {f"base_model.model.x{number}.lora_A.weight": torch.ones(1) for number in range(10_001)},
        {},
        "more than 10000",
    ),
]


def test_adapters_that_are_not_honoured_are_refused_by_name(tmp_path: Path) -> None:
    base = make_family(tmp_path / "base", "qwen 2", tie_word_embeddings=False).path
    table = DecoderDriver(load_checkpoint(base)).adapters

    def check_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            table.add(1, tmp_path / "adapter")
        assert len(str(caught.value)) < 1000
        assert str(tmp_path / "adapter") in str(caught.value)

    for config, message in CONFIG_REFUSALS:
        write_adapter(tmp_path / "adapter", base, ["q_proj"])
        change_config(tmp_path / "adapter", config)
        check_refused(message)
    for tensors, config, message in TENSOR_REFUSALS:
        write_adapter(tmp_path / "adapter", base, ["q_proj"], tensors=tensors)
        change_config(tmp_path / "adapter", config)
        check_refused(message)
    write_adapter(tmp_path / "adapter", base, ["q_proj"])
    tokenizer: dict[str, Any] = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    added = [{"content": "<new>", "id": 160}]
    for changed, message in (
        (tokenizer | {"added_tokens": added}, "tokenizer.json has other tokens"),
        (tokenizer | {"model": {"vocab": {"a": 1}}}, "tokenizer.json has other tokens"),
        ({}, "tokenizer.json has no model"),
    ):
        (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(changed))
        check_refused(message)
    tokenizer["model"]["type"] = "BPE"  # which changes no token
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert table.add(1, tmp_path / "adapter") > 0  # nothing of the refused ones is in the slot


def change_config(folder: Path, values: dict[str, object]) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_hostile_folders_are_refused(tmp_path: Path) -> None:
    base = make_family(tmp_path / "base", "qwen 2", tie_word_embeddings=False).path
    table = DecoderDriver(load_checkpoint(base)).adapters
    folder = tmp_path / "adapter"
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"

    def check_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            table.add(1, folder)

    check_refused("there is no file adapter_config.json")
    write_adapter(folder, base, ["q_proj"])
    outside = tmp_path / "outside"
    stored = tensors.read_bytes()
    for file in (config, tensors):
        content = file.read_bytes()
        file.rename(outside)
        file.symlink_to(outside)
        check_refused(f"{file.name} is a link out of the folder")
        file.unlink()
        os.mkfifo(file)
        check_refused(f"{file.name} is not a regular file")
        file.unlink()
        file.write_bytes(content)
    text = config.read_text()
    for changed, message in (
        ("[" * 100_000, "cannot read"),
        ("[]", "does not hold a JSON object"),
        (" " * (5 << 20) + text, "more than"),
    ):
        config.write_text(changed)
        check_refused(message)
    config.write_text(text)
    for content_bytes, message in (
        (b"", "cannot read"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "the header of adapter_model"),
        (stored[:-8], "cannot read"),
        (stored.replace(b'"F32"', b'"F99"'), "F99"),
        (overlap(stored), "cannot read"),
    ):
        tensors.write_bytes(content_bytes)
        check_refused(message)
    save_file({}, folder / "adapter_model-00002-of-00002.safetensors")
    check_refused("beside adapter_model.safetensors")
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()
    tensors.rename(folder / "adapter_model.bin")
    check_refused("there is no file adapter_model.safetensors")


def overlap(content: bytes) -> bytes:
    """Return a file in which all tensors have the data of the first one."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    entries = [value for name, value in header.items() if name != "__metadata__"]
    for entry in entries:
        entry["data_offsets"] = entries[0]["data_offsets"]
    changed = json.dumps(header).encode().ljust(size)
    return len(changed).to_bytes(8, "little") + changed + content[8 + size :]
