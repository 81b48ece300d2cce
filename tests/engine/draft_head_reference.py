"""Tiny random checkpoints with draft heads, and what the heads draft, computed in torch without a cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from argosy.models import DRAFT_MODEL
from tests.engine.decoder_driver import BLOCK_SIZE
from tests.engine.test_families import DELTA_NET, DELTA_NET_MOE, LATENT
from tests.engine.transformers_reference import SIZES, VOCAB, make_reference

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HIDDEN = int(SIZES["hidden_size"])
NUM_LAYERS = 4
EPS = 1e-6
DRAFT_VOCAB = 90


@dataclass(frozen=True)
class HeadReference:
    """Head of a target, whose checkpoints are in two directories or in one."""

    target: Path
    head: Path
    continue_states: Callable[[list[int], Tensor], Tensor]
    """Maps tokens and as many hidden states to the states that follow them."""
    read_states: Callable[[list[int]], Tensor]
    """Maps tokens of the target to the hidden states with which the head starts."""
    draft_logits: Callable[[Tensor], Tensor]
    target_tokens: list[int]

    def draft(self, tokens: list[int], count: int, first_state: int = 0) -> list[int]:
        """Return the likeliest drafts after some tokens, of which the hidden states of the first are missing.

        The head then starts with the block of the first state, in which missing ones are zero.
        """
        states, drafts = self.read_states(tokens[:-1]), list[int]()
        start = first_state // BLOCK_SIZE * BLOCK_SIZE
        states[start:first_state] = 0
        states = states[start:]
        for _ in range(count):
            following = self.continue_states([*tokens[start + 1 :], *drafts], states)[-1:]
            states = torch.cat((states, following))
            drafts.append(self.target_tokens[int(self.draft_logits(following).argmax())])
        return drafts


@dataclass(frozen=True)
class MtpCase:
    """Layout of a head for multi-token prediction, made from the last layer of a transformers model."""

    family: str
    options: dict[str, Any]
    layer: str
    names: tuple[str, ...]
    """Names of projection, norm of embeddings, norm of hidden states and last norm."""
    architecture: str = ""
    is_hidden_first: bool = False
    norm_offset: float = 0.0


MTP_CASES = {
    "deepseek 3": MtpCase(
        "DeepseekV3",
        LATENT | {"n_group": 4, "topk_group": 2},
        f"model.layers.{NUM_LAYERS}.",
        tuple(
            f"model.layers.{NUM_LAYERS}.{name}"
            for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        ),
    ),
    "mimo": MtpCase(
        "Qwen2",
        {},
        "model.mtp_layers.0.",
        tuple(
            f"model.mtp_layers.0.{name}"
            for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        ),
        "MiMoForCausalLM",
        is_hidden_first=True,
    ),
    "qwen 3 next": MtpCase(
        "Qwen3Next",
        DELTA_NET
        | DELTA_NET_MOE
        | {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2},
        "mtp.layers.0.",
        ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        norm_offset=1.0,
    ),
}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def causal_mask(size: int) -> Tensor:
    return torch.full((size, size), float("-inf")).triu(1)


def make_mtp_head(path: Path, case: MtpCase) -> HeadReference:
    """Save a target whose checkpoint has a head."""
    options = case.options | {"num_hidden_layers": NUM_LAYERS + 1}
    reference = make_reference(path, case.family, options)
    model = reference.model
    layer = f"model.layers.{NUM_LAYERS}."
    weights = {
        name.replace(layer, case.layer): tensor
        for name, tensor in load_file(path / WEIGHTS).items()
    }
    around = {case.names[0]: torch.randn(HIDDEN, 2 * HIDDEN) * 0.1}
    around |= {name: 1 - case.norm_offset + 0.2 * torch.randn(HIDDEN) for name in case.names[1:]}
    save_file(
        weights | {f"{name}.weight": tensor for name, tensor in around.items()}, path / WEIGHTS
    )
    config = json.loads((path / CONFIG).read_text())
    config |= {"num_hidden_layers": NUM_LAYERS}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:NUM_LAYERS]
    if case.architecture:
        config["architectures"] = [case.architecture]
    (path / CONFIG).write_text(json.dumps(config))
    projection, *norms = around.values()
    embedding_norm, hidden_norm, last_norm = (norm + case.norm_offset for norm in norms)

    def continue_states(tokens: list[int], states: Tensor) -> Tensor:
        embeddings = rms_norm(model.model.embed_tokens(torch.tensor(tokens)), embedding_norm)
        pair = [embeddings, rms_norm(states, hidden_norm)]
        x = F.linear(torch.cat(pair[::-1] if case.is_hidden_first else pair, 1), projection)[None]
        positions = torch.arange(len(tokens))[None]
        output = model.model.layers[NUM_LAYERS](
            x,
            attention_mask=causal_mask(len(tokens))[None, None],
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, positions),
        )
        output = output[0] if isinstance(output, tuple) else output
        return rms_norm(output[0], last_norm)

    def read_states(tokens: list[int]) -> Tensor:
        outputs = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        states: Tensor = model.model.norm(outputs.hidden_states[NUM_LAYERS])[0]
        return states

    return HeadReference(
        path, path, continue_states, read_states, model.lm_head, list(range(VOCAB))
    )


def make_bigram_model(path: Path) -> tuple[Path, Path]:
    """Save a model whose token depends on the one before it only, with a head of each kind that knows this.

    Returns the directory of the model, which has a head for multi-token prediction, and that of an EAGLE-3 head.
    """
    target = shutil.copytree(DRAFT_MODEL, path / "bigram")
    config = json.loads((target / CONFIG).read_text())
    hidden, size = config["hidden_size"], config["head_dim"]
    weights = load_file(target / WEIGHTS)
    dtype = weights["model.norm.weight"].dtype
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    layer = {
        name.removeprefix("model.layers.0."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.")
    }
    identity, ones, zeros = torch.eye(hidden), torch.ones(hidden), torch.zeros(hidden, hidden)
    biases = {
        f"self_attn.{name}_proj.bias": torch.zeros(len(layer[f"self_attn.{name}_proj.weight"]))
        for name in "qkv"
    }
    mtp = layer | biases
    mtp |= {
        "input_proj.weight": torch.cat((zeros, identity), 1),
        "token_layernorm.weight": ones,
        "hidden_layernorm.weight": ones,
        "final_layernorm.weight": weights["model.norm.weight"],
    }
    model = weights | {f"model.mtp_layers.0.{name}": tensor for name, tensor in mtp.items()}
    for index in range(config["num_hidden_layers"]):
        model |= {f"model.layers.{index}.{name}": tensor for name, tensor in biases.items()}
    save_file({name: tensor.to(dtype).clone() for name, tensor in model.items()}, target / WEIGHTS)
    mimo = config | {"architectures": ["MiMoForCausalLM"]}
    (target / CONFIG).write_text(json.dumps(mimo))

    head = path / "eagle"
    head.mkdir()
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_key_value_heads": hidden // size,
        "attention_bias": True,
    }
    (head / CONFIG).write_text(json.dumps(config | settings))
    attended = torch.full((hidden,), 40.0)  # each token attends to itself
    eagle = {
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.mlp.gate_proj.weight": layer["mlp.gate_proj.weight"],
        "midlayer.mlp.up_proj.weight": layer["mlp.up_proj.weight"],
        "midlayer.mlp.down_proj.weight": layer["mlp.down_proj.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    for name, weight, bias in [
        ("q", torch.cat((zeros, zeros), 1), attended),
        ("k", torch.cat((zeros, zeros), 1), attended),
        # the embedding takes the place of the state, whose norm is 1
        ("v", torch.cat((identity, -identity), 1), torch.zeros(hidden)),
        ("o", identity, torch.zeros(hidden)),
    ]:
        eagle[f"midlayer.self_attn.{name}_proj.weight"] = weight
        eagle[f"midlayer.self_attn.{name}_proj.bias"] = bias
    save_file({name: tensor.to(dtype).clone() for name, tensor in eagle.items()}, head / WEIGHTS)
    return target, head


def make_eagle_head(path: Path, form: str = "eagle 3", layers: Sequence[int] = ()) -> HeadReference:
    """Save a target, and an EAGLE-3 head with the settings and tensors of a tool that trains them.

    The head reads the states before `layers`, by default those that the form has for this target.
    """
    target, head = path / "target", path / "head"
    model = make_reference(target, "Llama", {"num_hidden_layers": NUM_LAYERS}).model
    head.mkdir()
    heads, kv_heads, size = 4, 2, 24
    layers = layers or ([2, NUM_LAYERS // 2, NUM_LAYERS - 3] if form == "early" else [1, 3, 4])
    adds_normed = form == "speculators"
    config: dict[str, Any] = SIZES | {
        "architectures": ["LlamaForCausalLM" if form == "early" else "LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "head_dim": size,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
    }
    if form == "speculators":
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": config,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": layers,
        }
    elif form != "early":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers]}
    config["draft_vocab_size"] = DRAFT_VOCAB
    (head / CONFIG).write_text(json.dumps(config))
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (heads * size, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, heads * size),
        "midlayer.mlp.gate_proj": (80, HIDDEN),
        "midlayer.mlp.up_proj": (80, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 80),
        "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }
    if form != "eagle 3":
        shapes["embed_tokens"] = (VOCAB, HIDDEN)
    torch.manual_seed(3)
    w = {
        name: torch.randn(shape) * 0.2 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
    target_tokens = sorted(torch.randperm(VOCAB)[:DRAFT_VOCAB].tolist())
    maps = {"d2t": torch.tensor(target_tokens) - torch.arange(DRAFT_VOCAB)}
    maps["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    layer = "layers.0" if form == "speculators" else "midlayer"
    stored = {f"{name.replace('midlayer', layer)}.weight": w[name] for name in w}
    save_file(stored | maps, head / WEIGHTS)
    embedding = w.get("embed_tokens", model.model.embed_tokens.weight)

    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] * 10_000.0 ** -(torch.arange(0, size, 2) / size)
        cos, sin = (table.repeat(1, 2)[:, None] for table in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def continue_states(tokens: list[int], states: Tensor) -> Tensor:
        embeddings = rms_norm(embedding[torch.tensor(tokens)], w["midlayer.input_layernorm"])
        normed = rms_norm(states, w["midlayer.hidden_norm"])
        inputs = torch.cat((embeddings, normed), 1)
        q, k, v = (
            F.linear(inputs, w[f"midlayer.self_attn.{name}_proj"]).unflatten(1, (-1, size))
            for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * size**-0.5 + causal_mask(len(tokens))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = (normed if adds_normed else states) + F.linear(attended, w["midlayer.self_attn.o_proj"])
        middle = rms_norm(x, w["midlayer.post_attention_layernorm"])
        gate, up = (F.linear(middle, w[f"midlayer.mlp.{name}_proj"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj"])

    def read_states(tokens: list[int]) -> Tensor:
        all_states: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: all_states.append(args[0][0]))
            for layer in model.model.layers
        ]
        hooks.append(
            model.model.norm.register_forward_pre_hook(
                lambda _, args: all_states.append(args[0][0])
            )
        )
        model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return F.linear(torch.cat([all_states[layer] for layer in layers], 1), w["fc"])

    def draft_logits(states: Tensor) -> Tensor:
        return F.linear(rms_norm(states, w["norm"]), w["lm_head"])

    return HeadReference(target, head, continue_states, read_states, draft_logits, target_tokens)
