"""Shapes of models, from a config.json or from the table of well-known models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from argosy.settings import load_yaml
from argosy.twin.hardware.accelerators import KV_BYTES, WEIGHT_BYTES, Precision
from argosy.twin.hardware.errors import CapacityError

MAX_CONFIG_BYTES = 1 << 20


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the dense feed-forward layers."""
    vocab: int
    gated_mlp: bool = True
    """Whether feed-forward layers have a gate, so that they are three matrices instead of two."""
    tied: bool = False
    """Whether input and output embeddings are the same matrix."""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of the expert that every token uses."""
    dense_layers: int = 0
    """Layers without experts in a model with experts."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Width of the latent that the KV cache holds. Above 0 for multi-head latent attention (MLA)."""
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    window: int = 0
    """Tokens that layers with a sliding window attend to."""
    window_layers: int = 0

    @property
    def is_moe(self) -> bool:
        """Whether feed-forward layers are mixtures of experts."""
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def mlp_matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated_mlp else 2

    def attention_parameters(self) -> int:
        """Return the parameters of the attention of one layer."""
        if self.kv_lora_rank:
            query = self.heads * (self.nope_dim + self.rope_dim)
            queries = (
                self.q_lora_rank * (self.hidden + query)
                if self.q_lora_rank
                else self.hidden * query
            )
            latent = self.hidden * (self.kv_lora_rank + self.rope_dim)
            values = self.kv_lora_rank * self.heads * (self.nope_dim + self.value_dim)
            return queries + latent + values + self.heads * self.value_dim * self.hidden
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    def expert_parameters(self) -> int:
        """Return the parameters of the routed experts of one layer."""
        return self.experts * self.mlp_matrices * self.hidden * self.expert_ffn

    def parameters(self) -> int:
        """Return the parameters of the model."""
        return self._bytes(1.0, 1.0, 1.0)

    def active_parameters(self) -> int:
        """Return the parameters that a token is multiplied with."""
        share = self.experts_per_token / self.experts if self.experts else 1.0
        return int(self._bytes(1.0, share, 1.0) - self.vocab * self.hidden * (not self.tied))

    def weight_bytes(self, weights: Precision) -> int:
        """Return the bytes of the weights. Embeddings stay in bf16, and beside 4-bit experts the attention does."""
        attention = attention_precision(self, weights)
        return self._bytes(WEIGHT_BYTES[attention], WEIGHT_BYTES[weights], WEIGHT_BYTES["bf16"])

    def _bytes(self, attention: float, experts: float, embedding: float) -> int:
        dense = self.mlp_matrices * self.hidden
        total = self.layers * self.attention_parameters() * attention
        total += (self.layers - self.moe_layers) * dense * self.ffn * attention
        total += self.moe_layers * (
            self.expert_parameters() * experts
            + (dense * self.shared_ffn + self.hidden * self.experts) * attention
        )
        return int(total + self.vocab * self.hidden * embedding * (1 if self.tied else 2))

    def kv_bytes_per_token(self, kv: str, *, window_share: float = 1.0) -> float:
        """Return the bytes of a token in the KV cache of all layers.

        Args:
            kv: Type of the KV cache.
            window_share: Share of the tokens that layers with a sliding window keep.
        """
        if self.kv_lora_rank:
            return self.layers * (self.kv_lora_rank + self.rope_dim) * KV_BYTES[kv]
        layers = self.layers - self.window_layers * (1 - window_share)
        return layers * 2 * self.kv_heads * self.head_dim * KV_BYTES[kv]


def attention_precision(shape: ModelShape, weights: Precision) -> Precision:
    """Return the type of the attention's weights: published 4-bit checkpoints of experts keep it in bf16."""
    return "bf16" if shape.is_moe and weights in {"fp4", "int4"} else weights


def parse_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from the value of its config.json.

    Raises:
        CapacityError: A size is missing, is not positive, or is above all known models.
    """
    config = config.get("text_config") or config
    read = _ConfigReader(name, config)
    heads = read.size("num_attention_heads", "n_head")
    hidden = read.size("hidden_size", "n_embd")
    layers = read.size("num_hidden_layers", "n_layer")
    experts = read.count("num_experts", "num_local_experts", "n_routed_experts")
    ffn = read.count("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    expert_ffn = read.count("moe_intermediate_size") or ffn
    types = config.get("layer_types") or []
    window = read.count("sliding_window") if config.get("use_sliding_window", True) else 0
    sliding = read.count("sliding_layers") or sum(kind == "sliding_attention" for kind in types)
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=read.count("num_key_value_heads") or heads,
        head_dim=read.count("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=read.size("vocab_size"),
        gated_mlp=bool(config.get("gated_mlp", config.get("model_type") not in _PLAIN_MLP)),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=read.size("num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_ffn=expert_ffn if experts else 0,
        shared_ffn=(
            read.count("n_shared_experts") * expert_ffn
            or read.count("shared_expert_intermediate_size")
        ),
        dense_layers=read.count("first_k_dense_replace") if experts else 0,
        q_lora_rank=read.count("q_lora_rank"),
        kv_lora_rank=read.count("kv_lora_rank"),
        rope_dim=read.count("qk_rope_head_dim"),
        nope_dim=read.count("qk_nope_head_dim"),
        value_dim=read.count("v_head_dim"),
        window=window,
        window_layers=min(sliding, layers) if window else 0,
    )


_PLAIN_MLP = frozenset({"gptj", "falcon", "bloom", "opt", "gpt2", "gpt_neox", "phi"})
"""Families whose feed-forward layers have no gate."""
MAX_SIZE = 10_000_000


class _ConfigReader:
    """Reader of the sizes in a config.json."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config

    def count(self, *keys: str) -> int:
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
                raise CapacityError(
                    f"{self._name}: {key} is {value!r}; give a whole number from 0 to {MAX_SIZE:,}"
                )
            return value
        return 0

    def size(self, *keys: str) -> int:
        found = self.count(*keys)
        if not found:
            raise CapacityError(
                f"{self._name}: config.json has no {keys[0]}; give it a positive number"
            )
        return found


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: Name in the table of well-known models, with or without its owner, or path of a config.json or of the
            folder that has one. A file above 1 MiB is refused.

    Raises:
        CapacityError: The model is unknown, or its file cannot be used.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    return parse_shape(model, _read_config(path)) if path.is_file() else find_shape(model)


def find_shape(model: str) -> ModelShape:
    """Return the shape of a well-known model by its name, with or without its owner. No file is read.

    Raises:
        CapacityError: The model is unknown.
    """
    key = model.strip().lower()
    table = _table()
    for name, entry in table.items():
        if key in {name, entry["source"].lower(), *entry.get("aliases", ())}:
            return parse_shape(name, entry["config"])
    short = key.rpartition("/")[2]
    if short != key:
        return find_shape(short)
    raise CapacityError(
        f"the shape of {model!r} is not known; give the path of its config.json, or one of {', '.join(table)}"
    )


def model_source(model: str) -> str:
    """Return the place of a model's weights: its name on the hub, or the text as it was given."""
    entry = _table().get(model)
    return model if entry is None else str(entry["source"])


def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = load_yaml(
        resources.files("argosy.twin.hardware").joinpath("models.yaml").read_bytes()
    )
    return table


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CapacityError(f"{path} is above 1 MiB; give the config.json of a model")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CapacityError(f"cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise CapacityError(
            f"{path} is not JSON ({error}); give the config.json of a model"
        ) from error
    if not isinstance(value, dict):
        raise CapacityError(f"{path} has no JSON object; give the config.json of a model")
    return value
