"""Gated delta net (Yang et al. 2024), which takes the place of attention in recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture, ModelArchitecture
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights
from argosy.engine.execution.kernels.rope import RopeRotation
from argosy.engine.execution.layers.modules import (
    GatedActivation,
    LoadableModule,
    Projection,
    RmsNorm,
)


class GatedDeltaNet(nn.Module):
    """Gated delta net: projections, the delta rule, and a norm of each head with an output gate.

    `layer` is the index of the layer in the recurrent states.
    """

    def __init__(self, architecture: ModelArchitecture, layer: int) -> None:
        super().__init__()
        net = architecture.delta_net
        if net is None:
            raise ValueError(f"{architecture.architecture} has no recurrent layers")
        hidden = architecture.hidden_size
        self.qkvz = Projection(
            hidden, net.channels + net.value_size, bias=False, row_order=_projection_order(net)
        )
        self.factors = Projection(
            hidden, 2 * net.value_heads, bias=False, row_order=_factor_order(net)
        )
        self.rule = DeltaRuleModule(net)
        self.norm = RmsNorm(net.value_dim, "narrow", architecture.norm_eps)
        self.gate = GatedActivation("silu")
        self.o = Projection(net.value_size, hidden, bias=False)
        self._split = (net.channels, net.value_size)
        self._layer = layer

    def forward(self, x: Tensor, rope: RopeRotation, batch: Batch, attention: Attention) -> Tensor:
        """Map x [T, hidden] to [T, hidden]. Positions and the KV cache are not used."""
        del rope, attention
        adapters = batch.token_adapters
        qkv, z = self.qkvz.forward(x, adapters).split_with_sizes(self._split, 1)
        heads = self.rule.forward(qkv, self.factors.forward(x, adapters), batch, self._layer)
        normed = self.norm.forward(heads).flatten(1)
        return self.o.forward(self.gate.forward(torch.cat((z, normed), 1)), adapters)


class DeltaRuleModule(LoadableModule):
    """Delta rule with its own weights, which are few and keep float32."""

    dtype = torch.float32

    def __init__(self, net: DeltaNetArchitecture) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.empty(net.channels, 1, net.conv_width))
        self.decay = nn.Parameter(torch.empty(net.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(net.value_heads))
        self._net = net
        self._compute: DeltaRule

    def process_weights_after_loading(self, device: Device) -> None:
        """Create the device's delta rule with the weights."""
        weights = DeltaRuleWeights(
            conv=self.conv.detach().squeeze(1).T.contiguous(),
            decay_rate=self.decay.detach().exp().neg_(),
            decay_bias=self.decay_bias.detach().contiguous(),
        )
        self._compute = device.create_delta_rule(self._net, weights)
        del self.conv, self.decay, self.decay_bias

    def forward(self, qkv: Tensor, factors: Tensor, batch: Batch, layer: int) -> Tensor:
        """Map queries, keys and values [T, channels] to the output of each head, [T, value_heads, value_dim]."""
        if batch.states is None:
            raise ValueError("the batch has no recurrent states; attach them with RecurrentStates")
        return self._compute(qkv, factors, batch.states, layer, batch)


def _projection_order(net: DeltaNetArchitecture) -> tuple[int, ...] | None:
    """Return the order of the rows of queries, keys, values and gates, if they are stored by key head."""
    values = net.value_size // net.key_heads
    return _ungroup(net, (net.key_dim, net.key_dim, values, values))


def _factor_order(net: DeltaNetArchitecture) -> tuple[int, ...] | None:
    """Return the order of the rows of both factors, if they are stored by key head."""
    return _ungroup(net, (net.value_heads // net.key_heads,) * 2)


def _ungroup(net: DeltaNetArchitecture, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order in which the parts of all key heads follow each other, given the rows of a head's parts."""
    if not net.is_grouped:
        return None
    head_rows = sum(sizes)
    order: list[int] = []
    for part, size in enumerate(sizes):
        first = sum(sizes[:part])
        for head in range(net.key_heads):
            start = head * head_rows + first
            order += range(start, start + size)
    return tuple(order)
