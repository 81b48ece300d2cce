"""Adapters (LoRA): equal to PEFT, independent of the batch, and refused by name where they are not honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.adapter_files import ATTENTION, MLP, write_adapter
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.transformers_reference import Reference, make_reference

ALL = [*ATTENTION, *MLP]
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
        present = [t for t in ALL if any(name.endswith(t) for name in modules)]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_other_rows_and_their_adapters(
    tmp_path: Path, isa: str, dtype: torch.dtype
) -> None:
    base = make_family(tmp_path / "base", "qwen 2", tie_word_embeddings=False)
    driver = DecoderDriver(load_checkpoint(base.path, dtype))
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
