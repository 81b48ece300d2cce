"""Run of a model on the `meta` device, which records how its layers attend and what else it computes.

The records come from the model's own calls, so that no table of families is needed. A model whose calls paged attention
cannot compute is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.kernels.torch.rowwise_ops import InexactCallRecorder

NUM_TOKENS = 3
"""Number of tokens of the run."""
OWN_ATTENTION = "computes attention in its own way (as models with ALiBi do)"
_FAR = 4096
"""Distance over which a mask without a window is checked."""
_HARMLESS_ARGUMENTS = {
    "attention_mask",
    "cache_position",
    "cos",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "inputs_embeds",
    "logits_to_keep",
    "position_embeddings",
    "position_ids",
    "sin",
}
"""Tensor arguments of attention functions that do not change the result."""


class UnsupportedModelError(Exception):
    """The model computes something that paged attention cannot compute. The message completes `the model ...`."""


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """Attention of one layer as the model's code called it: the module, the sizes and the parameters."""

    module: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """Records of a run."""

    layers: list[TracedLayer]
    experts: list[nn.Module]
    """Modules that compute 3-D expert parameters."""
    used_modules: dict[str, nn.Module]
    """Modules that generate text by their names. Others, such as a vision tower, did not run."""
    inexact_modules: list[nn.Module]
    """Modules that call functions which `rowwise_ops` replaces."""
    unreplaced_functions: list[str]
    """Called functions that may be inexact and have no replacement."""
    vocab_size: int
    selects_logits: bool
    """Whether the model computes only the logits of the positions that it is asked for."""


class AttentionTracer:
    """Attention, masks and experts of the run on `meta`, which record how the model calls them."""

    def __init__(self) -> None:
        self.layers: list[TracedLayer] = []
        self.experts: list[nn.Module] = []
        self._windows: dict[int, tuple[Tensor, int | None]] = {}
        """Id of a mask -> the mask, which keeps the id in use, and its window."""

    def build_mask(self, **kwargs: Any) -> Tensor:  # noqa: ANN401 - of transformers
        """Return a mask that stands for the mask function, after checking what the function allows."""
        window = kwargs.get("local_size")
        if not _is_causal(kwargs["mask_function"], window):
            raise UnsupportedModelError(
                "attends neither to all earlier tokens nor to a sliding window of them"
            )
        mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device="meta")
        self._windows[id(mask)] = mask, window
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Record a layer's attention."""
        if s_aux is not None:
            raise UnsupportedModelError("has attention sinks")
        for name, argument in kwargs.items():
            if isinstance(argument, Tensor) and name not in _HARMLESS_ARGUMENTS:
                raise UnsupportedModelError(f"passes {name} to its attention")
        if query.shape[-1] != key.shape[-1] or key.shape != value.shape:
            raise UnsupportedModelError(
                "has keys and values of different sizes (multi-head latent attention)"
            )
        if query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
            raise UnsupportedModelError("attends to other tokens than those of its sequence")
        if attention_mask is None and not getattr(module, "is_causal", True):
            raise UnsupportedModelError("attends to later tokens")
        if attention_mask is not None:
            if id(attention_mask) not in self._windows:
                raise UnsupportedModelError("adds a bias to its attention scores (such as ALiBi)")
            sliding_window = self._windows[id(attention_mask)][1]
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedModelError("uses one attention module in several layers")
        heads, head_dim = query.shape[1], query.shape[3]
        params = AttentionParams(
            layer=len(self.layers),
            scale=head_dim**-0.5 if scaling is None else float(scaling),
            sliding_window=sliding_window,
            softcap=softcap,
        )
        self.layers.append(TracedLayer(module, heads, key.shape[1], head_dim, params))
        return torch.empty_like(query).transpose(1, 2).contiguous(), None

    def compute_experts(
        self, experts: nn.Module, x: Tensor, expert_ids: Tensor, expert_weights: Tensor
    ) -> Tensor:
        """Record a module of experts."""
        del expert_ids, expert_weights
        self.experts.append(experts)
        return torch.empty_like(x)


@torch.no_grad()
def trace_model(
    module: nn.Module,
    tracer: AttentionTracer,
    run: Callable[..., Tensor],
    is_packed: Callable[[nn.Module], bool],
) -> ModelTrace:
    """Run the model, whose attention, masks and experts are those of `tracer`, on `meta`.

    `run` maps (module, token ids [T], positions [T], logit index, attention_mask) to logits, and `is_packed` says
    whether a module will be replaced by a packed linear layer.

    Raises:
        UnsupportedModelError: The model cannot be served.
    """
    recorder = InexactCallRecorder(is_packed)
    try:
        with torch.device("meta"), recorder:
            logits = run(
                module,
                torch.zeros(NUM_TOKENS, dtype=torch.int64),
                torch.arange(NUM_TOKENS),
                torch.zeros(1, dtype=torch.int64),
                # with a mask, transformers does not search the positions for packed sequences
                attention_mask=torch.ones(1, NUM_TOKENS, dtype=torch.int64),
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        message = f"needs code that does more than run layers ({first_line(error)})"
        raise UnsupportedModelError(message) from error
    layers = tracer.layers
    if not layers:
        raise UnsupportedModelError(OWN_ATTENTION)
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        raise UnsupportedModelError("has layers with different numbers or sizes of heads")
    names = {part: name for name, part in module.named_modules()}
    return ModelTrace(
        layers=layers,
        experts=tracer.experts,
        used_modules={names[part]: part for part in recorder.visited},
        inexact_modules=recorder.modules,
        unreplaced_functions=sorted(recorder.unreplaced),
        vocab_size=logits.shape[-1],
        selects_logits=logits.shape[0] == 1,
    )


def first_line(error: Exception) -> str:
    """Return the type and the start of the message of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Return whether a mask function allows all earlier tokens, or the last `window` of them, at selected positions."""
    length = window or _FAR
    queries = (0, 1, length - 1, length, length + 1, 2 * length + 3, 3 * length)
    points = [
        (query, key)
        for query in queries
        for key in {0, 1, query - length, query - length + 1, query - 1, query, query + 1}
        if key >= 0
    ]
    with torch.device("cpu"):
        q, k = (torch.tensor(column) for column in zip(*points, strict=True))
        zeros = torch.zeros_like(q)
        try:
            allowed = torch.as_tensor(mask_function(zeros, zeros, q, k))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return False
        expected = k <= q if window is None else (k <= q) & (k > q - window)
        return torch.equal(allowed.expand_as(expected), expected)
