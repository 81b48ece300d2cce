"""Modules of a decoder layer over flat tokens, which are projections, norms and gated MLP.

Every result depends only on its own token's row, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder import (
    Activation,
    ModelArchitecture,
    NormKind,
    NormPosition,
)
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch, RowAdapters
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.operations import Norm
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.engine.execution.kernels.rope import RopeRotation

UNQUANTIZED_NAMES = {"router", "gate", "shared_gate", "shared_expert_gate", "factors"}
"""Last names of linear layers that select experts, or decide how much of a state decays."""


def weight_format_for(
    module_name: str, quantize: WeightFormat | None, *, is_head: bool
) -> WeightFormat | None:
    """Return the weight format of a linear layer in a model quantized to `quantize`.

    The head keeps 8 bits, since each of its errors is an error of a logit. Routers, the gates of shared experts and the
    factors of delta nets are not quantized, because they are small and each of their outputs decides much. The
    embedding is not quantized either, because a token reads only one of its rows, which are mapped from the checkpoint.
    """
    if module_name.rpartition(".")[2] in UNQUANTIZED_NAMES:
        return None
    return "int8" if is_head and quantize == "int4" else quantize


class LoadableModule(nn.Module):
    """Module whose own parameters are declared on `meta` and assigned by the loader.

    Callers call `forward` directly, which saves the lookup of hooks, since no module has hooks.
    """

    dtype: torch.dtype | None = None
    """Dtype of the parameters. None is the model's."""

    def process_weights_after_loading(self, device: Device) -> None:
        """Convert the assigned parameters to the form that `forward` needs. Called once, after those of submodules."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Where the matrix of a linear layer is stored, from where an adapter reads it again."""

    parts: tuple[tuple[str, int], ...]
    """Name and number of rows of each stored tensor, whose rows together are the matrix."""
    read_weight: Callable[[], Tensor]
    """Read the matrix [N, K] with which the layer computes, in the order of the checkpoint."""
    read_bias: Callable[[], Tensor | None]
    """Read the bias [N] in the order of the checkpoint."""


class Projection(LoadableModule):
    """Linear layer x @ weight.T + bias, packed by the device, with the weight rounded to `weight_format`.

    `row_order` maps each output to its row in the checkpoint. None is the same order.
    """

    number: int
    """Number of the layer among those that adapters can change."""
    stored: StoredMatrix | None = None

    def __init__(
        self,
        cols: int,
        rows: int,
        bias: bool,  # noqa: FBT001 - data of a spec
        row_order: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs = cols
        self.row_order = row_order
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.weight_format: WeightFormat | None = None
        self._linear: Callable[[Tensor], Tensor]

    def process_weights_after_loading(
        self, device: Device, get_packed: PackedWeightProvider = pack_in_memory
    ) -> None:
        """Pack the weight, or get its packed form from `get_packed`, and release the unpacked weight."""
        if self.weight is None:
            raise RuntimeError("process_weights_after_loading was called twice")
        weight = _reorder(self.weight, self.row_order)
        bias = None if self.bias is None else _reorder(self.bias, self.row_order)
        self._linear = device.create_linear(weight, bias, self.weight_format, get_packed)
        self.weight = self.bias = None

    @property
    def linear(self) -> Callable[[Tensor], Tensor]:
        """Function of the packed layer."""
        return self._linear

    def set_linear(self, linear: Callable[[Tensor], Tensor]) -> None:
        """Compute with a linear layer that is already packed."""
        self._linear = linear
        self.weight = self.bias = None

    def forward(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Map x [T, cols] to [T, rows], for which some rows may have adapters."""
        out = self._linear(x)
        if adapters is not None:
            adapters.update_linear(self.number, x, out)
        return out


class RmsNorm(LoadableModule):
    """RMS norm over the last dimension, of the model family's kind."""

    def __init__(self, size: int, kind: NormKind, eps: float) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(size))
        self._kind = kind
        self._eps = eps
        self._norm: Norm

    def process_weights_after_loading(self, device: Device) -> None:
        """Create the device's norm with the weight."""
        if self.weight is None:
            raise RuntimeError("process_weights_after_loading was called twice")
        self._norm = device.elementwise_ops.create_norm(self._kind, self.weight, self._eps)
        self.weight = None

    @property
    def scale(self) -> Tensor:
        """Factors of the elements, float32 [size]."""
        return self._norm.scale

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension, which has `size` elements."""
        return self._norm(x)

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Add delta, if any, to x [T, size] in place, and return the normalized sum."""
        return self._norm(x) if delta is None else self._norm.add_and_norm(x, delta)


class GatedActivation(LoadableModule):
    """Gated activation, which maps each row to activation(first half, second half)."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._activation = activation
        self._compute: Callable[[Tensor], Tensor]

    def process_weights_after_loading(self, device: Device) -> None:
        """Create the device's gated activation."""
        self._compute = device.elementwise_ops.create_gated_activation(self._activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, 2 * size] to [T, size]."""
        return self._compute(x)


class Mlp(nn.Module):
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer 2020), with gate and up as one matrix.

    The rows of gate and up alternate in the checkpoint if they are `interleaved`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        bias: bool,  # noqa: FBT001 - data of a spec
        activation: Activation,
        interleaved: bool = False,  # noqa: FBT001, FBT002 - data of a spec
    ) -> None:
        super().__init__()
        size = 2 * intermediate
        order = (*range(0, size, 2), *range(1, size, 2)) if interleaved else None
        self.gate_up = Projection(hidden, size, bias, order)
        self.down = Projection(intermediate, hidden, bias)
        self.gate = GatedActivation(activation)

    def forward(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Map x [T, hidden] to [T, hidden], for which some rows may have adapters."""
        return self.down.forward(self.gate.forward(self.gate_up.forward(x, adapters)), adapters)


class IdentityNorm(LoadableModule):
    """Identity, for positions without a norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Add delta, if any, to x in place, and return x."""
        return x if delta is None else x.add_(delta)


class DecoderLayer(nn.Module):
    """Decoder layer of attention and MLP, with norms at the family's positions before and after each."""

    def __init__(
        self, architecture: ModelArchitecture, rope_index: int, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_in = _build_norm(architecture, "attention_in")
        self.attention_out = _build_norm(architecture, "attention_out")
        self.mlp_in = _build_norm(architecture, "mlp_in")
        self.mlp_out = _build_norm(architecture, "mlp_out")
        self.rope_index = rope_index

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: RopeRotation,
        batch: Batch,
        attention: Attention,
    ) -> Tensor:
        """Add `delta`, the output of the layer before, to the residual stream x [T, hidden] in place.

        Returns:
            Output of the layer [T, hidden], which the next layer or the last norm adds to x in one pass with its norm.
        """
        normed = self.attention_in.add_and_norm(x, delta)
        return self.forward_normed(x, normed, rope, batch, attention)

    def forward_normed(
        self, x: Tensor, normed: Tensor, rope: RopeRotation, batch: Batch, attention: Attention
    ) -> Tensor:
        """Compute the layer from `normed`, the input of the attention. The rest is that of `forward`."""
        output = self.attention.forward(normed, rope, batch, attention)
        normed = self.mlp_in.add_and_norm(x, self.attention_out.forward(output))
        return self.mlp_out.forward(self.mlp.forward(normed, batch.token_adapters))


def _reorder(rows: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return the rows in another order. Rows on `meta` have no content, and so no order."""
    if order is None or rows.is_meta:
        return rows
    return rows[torch.tensor(order, device=rows.device)]


def _build_norm(architecture: ModelArchitecture, position: NormPosition) -> RmsNorm | IdentityNorm:
    return (
        RmsNorm(architecture.hidden_size, architecture.norm_kind, architecture.norm_eps)
        if position in architecture.norm_positions
        else IdentityNorm()
    )
