"""Quantization of a decoder, layer by layer, with the inputs that each layer has when the quantized model is served.

Two copies of a layer are in memory: one in full precision, and one whose linear layers are quantized one after the
other. The calibration tokens flow through both. Between layers only their hidden states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from argosy.engine.execution.architectures.checkpoint_tensors import find_parts
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedSource, select_rows
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import pack_in_memory
from argosy.engine.execution.kernels.rope import build_rope_table
from argosy.engine.execution.layers.modules import DecoderLayer, Mlp, Projection, RmsNorm
from argosy.engine.execution.layers.moe import MixtureOfExperts
from argosy.engine.execution.layers.self_attention import SelfAttention
from argosy.engine.execution.loading.weight_loader import load_submodule
from argosy.engine.quantization.checkpoint_writer import CheckpointWriter
from argosy.engine.quantization.hidden_states import allocate_states
from argosy.engine.quantization.layer_pair import LayerPair
from argosy.engine.quantization.token_batches import DocumentBatches
from argosy.engine.quantization.weight_rounding import (
    InputStatistics,
    Recipe,
    RoundedWeight,
    find_input_scales,
    round_to_nearest,
    round_with_feedback,
)
from argosy.model_store import RoundingMethod

MIN_EXPERT_TOKENS = 256
"""Calibration tokens below which an expert is rounded to the nearest."""
MAX_SCALE_ROWS = 1024
"""Inputs with which AWQ's scales are searched."""


@dataclass(slots=True)
class QuantizationSummary:
    """Counts of the quantized matrices, and names of the others."""

    matrices: int = 0
    """Quantized matrices, as the checkpoint stores them."""
    kept: list[str] = field(default_factory=list)
    """Matrices that keep their dtype: those that do not divide into groups, and experts that share a tensor."""
    scaled: list[str] = field(default_factory=list)
    """Layers whose error AWQ's scales lower."""
    experts: int = 0
    rounded_experts: list[str] = field(default_factory=list)
    """Experts with too few calibration tokens, which are rounded to the nearest."""


class ModelQuantizer:
    """Quantizes the layers of a decoder in order, and gives the tensors of the quantized checkpoint to a writer."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        architecture: ModelArchitecture,
        device: Device,
        recipe: Recipe,
        method: RoundingMethod,
        writer: CheckpointWriter,
    ) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._device = device
        self._recipe = recipe
        self._method = method
        self._writer = writer
        self._decoders = tuple(Decoder(architecture, device, torch.bfloat16) for _ in range(2))
        self._summary = QuantizationSummary()
        self._replaced: set[str] = set()
        """Stored tensors of the checkpoint whose place others take."""

    @torch.inference_mode()
    def run(
        self,
        documents: Sequence[Sequence[int]],
        scratch: Path,
        progress: Callable[[float], None],
    ) -> QuantizationSummary:
        """Quantize all layers, and write the checkpoint.

        Args:
            documents: Token ids for calibration.
            scratch: Folder for hidden states that are too large for the memory.
            progress: Called with the finished fraction, 0 to 1.

        Raises:
            ValueError: A tensor is missing or damaged. The message names it.
            OSError, SafetensorError: A file cannot be written.
        """
        full, quantized = self._decoders
        batches = DocumentBatches(documents, full)
        ropes = [
            build_rope_table(each, self._architecture.max_model_len)
            for each in self._architecture.ropes
        ]
        states = self._embed(batches, scratch)
        count = self._architecture.num_layers
        for index in range(count):
            name = f"layers.{index}"
            for decoder in self._decoders:
                self._load(name, decoder)
            layer, copy = full.layers[index], quantized.layers[index]
            if not isinstance(layer, DecoderLayer) or not isinstance(copy, DecoderLayer):
                raise TypeError(f"{name} is no decoder layer")
            pair = LayerPair(layer, copy, batches, states, ropes[layer.rope_index])
            self._quantize_layer(pair, name, scratch)
            pair.advance()
            full.layers[index] = quantized.layers[index] = nn.Module()
            progress((index + 1) / count)
        self._copy_rest()
        return self._summary

    def _embed(self, batches: DocumentBatches, scratch: Path) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens before the first layer, for both forms of the model."""
        full = self._decoders[0]
        self._load("embed", full)
        sizes = (batches.num_tokens, self._architecture.hidden_size)
        states = (
            allocate_states(sizes, torch.bfloat16, scratch),
            allocate_states(sizes, torch.bfloat16, scratch),
        )
        for tokens, batch in batches:
            embedded = full.embed.forward(batch.token_ids)
            for state in states:
                state[tokens] = embedded
        return states

    def _quantize_layer(self, pair: LayerPair, name: str, scratch: Path) -> None:
        for linear in pair.list_linears():
            module = pair.quantized.get_submodule(linear)
            if isinstance(module, MixtureOfExperts):
                self._quantize_experts(pair, f"{name}.{linear}", module, scratch)
            elif isinstance(module, Projection):
                self._quantize_linear(pair, name, linear, module)

    def _quantize_linear(
        self, pair: LayerPair, layer: str, linear: str, module: Projection
    ) -> None:
        """Quantize one linear layer with the inputs of all tokens."""
        name = f"{layer}.{linear}"
        weight = self._read_weight(name)
        if weight is None:
            return
        if self._method == "gptq":
            statistics = InputStatistics(weight.shape[1])
            pair.collect_inputs(linear, lambda _, full, actual: statistics.add(full, actual))
            rounded = round_with_feedback(weight, statistics, self._recipe)
        else:
            scales = (
                self._scale_norm(pair, layer, linear, weight) if self._method == "awq" else None
            )
            scaled = weight if scales is None else weight.float() * scales
            rounded = round_to_nearest(scaled, self._recipe)
        self._apply(name, module, rounded)

    def _scale_norm(
        self, pair: LayerPair, layer: str, linear: str, weight: Tensor
    ) -> Tensor | None:
        """Divide the norm before a linear layer by AWQ's scales [K], and return them. None if they do not help."""
        norm_name = _find_norm(pair.quantized, linear)
        if norm_name is None:
            return None
        samples: list[tuple[Tensor, Tensor]] = []
        step = max(pair.num_tokens // MAX_SCALE_ROWS, 1)
        pair.collect_inputs(
            linear, lambda _, full, actual: samples.append((full[::step], actual[::step]))
        )
        full, actual = (torch.cat(rows) for rows in zip(*samples, strict=True))
        scales = find_input_scales(weight, full, actual, self._recipe)
        if scales is None:
            return None
        parameter = f"{layer}.{norm_name}.weight"
        (part,) = self._find_parts(parameter)
        stored = self._checkpoint.read_parts([part])
        shift = 1.0 if self._architecture.norm_kind == "offset" else 0.0
        divided = ((stored.float() + shift) / scales - shift).to(stored.dtype)
        norm = RmsNorm(len(stored), self._architecture.norm_kind, self._architecture.norm_eps)
        norm.weight = nn.Parameter(divided.bfloat16(), requires_grad=False)
        norm.process_weights_after_loading(self._device)
        setattr(pair.quantized, norm_name, norm)
        self._writer.add(part.name, divided)
        self._replaced.add(part.name)
        self._summary.scaled.append(f"{layer}.{linear}")
        return scales

    def _quantize_experts(
        self,
        pair: LayerPair,
        name: str,
        module: MixtureOfExperts,
        scratch: Path,
    ) -> None:
        """Quantize the experts of a layer, each with the tokens that reach it if twice as many experts are active."""
        other = pair.full.mlp
        moe = self._architecture.moe
        if moe is None or not isinstance(other, MixtureOfExperts):
            raise TypeError(f"{name} is no mixture of experts")
        count = min(2 * moe.num_experts_per_token, moe.num_experts)
        routing = replace(moe, num_experts_per_token=count)
        sizes = (pair.num_tokens, self._architecture.hidden_size)
        inputs = [allocate_states(sizes, torch.bfloat16, scratch) for _ in range(2)]
        chosen = torch.empty(pair.num_tokens, count, dtype=torch.int64)

        def keep(tokens: slice, full: Tensor, actual: Tensor) -> None:
            inputs[0][tokens], inputs[1][tokens] = full, actual
            router = module.router
            logits = router.forward(actual if router.dtype is None else actual.to(router.dtype))
            _, chosen[tokens] = self._device.select_experts(
                logits, router.e_score_correction_bias, routing, actual.dtype
            )

        pair.collect_inputs("mlp", keep)
        for number, (full, actual) in enumerate(zip(other.experts, module.experts, strict=True)):
            if not isinstance(full, Mlp) or not isinstance(actual, Mlp):
                raise TypeError(f"{name} has an expert that is no MLP")
            rows = (chosen == number).any(1).nonzero().flatten()
            self._quantize_expert(
                f"{name}.experts.{number}", full, actual, inputs[0][rows], inputs[1][rows]
            )

    def _quantize_expert(
        self, name: str, full: Mlp, actual: Mlp, full_x: Tensor, actual_x: Tensor
    ) -> None:
        self._summary.experts += 1
        is_calibrated = len(actual_x) >= MIN_EXPERT_TOKENS and self._method == "gptq"
        if len(actual_x) < MIN_EXPERT_TOKENS and self._method != "rtn":
            self._summary.rounded_experts.append(name)
        for linear in ("gate_up", "down"):
            weight = self._read_weight(f"{name}.{linear}")
            if weight is not None and is_calibrated:
                statistics = InputStatistics(weight.shape[1])
                statistics.add(full_x, actual_x)
                rounded = round_with_feedback(weight, statistics, self._recipe)
                self._apply(f"{name}.{linear}", actual.get_submodule(linear), rounded)
            elif weight is not None:
                rounded = round_to_nearest(weight, self._recipe)
                self._apply(f"{name}.{linear}", actual.get_submodule(linear), rounded)
            if linear == "gate_up" and is_calibrated:
                full_x = full.gate.forward(full.gate_up.forward(full_x))
                actual_x = actual.gate.forward(actual.gate_up.forward(actual_x))

    def _read_weight(self, name: str) -> Tensor | None:
        """Read the matrix of a linear layer, or return None if it keeps its dtype."""
        parts = self._find_parts(f"{name}.weight")
        is_own = all(part.entry is None and part.name.endswith(".weight") for part in parts)
        if is_own and self._recipe.fits(self._checkpoint.part_shape(parts[0])[1]):
            return self._checkpoint.read_parts(parts)
        self._summary.kept += [part.name for part in parts if part.name not in self._summary.kept]
        return None

    def _apply(self, name: str, module: nn.Module, rounded: RoundedWeight) -> None:
        """Compute with a rounded weight from now on, and write it."""
        if not isinstance(module, Projection):
            raise TypeError(f"{name} is no linear layer")
        grouped, bias = rounded.to_grouped(), None
        bias_parts = find_parts(self._architecture, f"{name}.bias", self._checkpoint.files)
        if bias_parts is not None:
            bias = self._checkpoint.read_parts(bias_parts).bfloat16()
        if module.row_order is not None:
            order = torch.tensor(module.row_order)
            grouped = select_rows(grouped, order)
            bias = None if bias is None else bias[order]
        shape = (grouped.values.shape[0], grouped.values.shape[1])
        source = GroupedSource(grouped.format, shape, lambda: grouped)
        module.set_linear(self._device.create_group_linear(source, bias, pack_in_memory))
        start = 0
        for part in self._find_parts(f"{name}.weight"):
            end = start + self._checkpoint.part_shape(part)[0]
            rows = replace(
                rounded,
                codes=rounded.codes[start:end].clone(),
                scales=rounded.scales[start:end].clone(),
            )
            self._writer.add_rounded(part.name, rows)
            self._replaced.add(part.name)
            self._summary.matrices += 1
            start = end

    def _load(self, name: str, decoder: Decoder) -> None:
        parts = {
            parameter: self._find_parts(parameter)
            for parameter, _ in decoder.get_submodule(name).named_parameters(name)
        }
        load_submodule(self._checkpoint, decoder, name, parts, self._device, torch.bfloat16)

    def _find_parts(self, parameter: str) -> tuple[StoredPart, ...]:
        parts = find_parts(self._architecture, parameter, self._checkpoint.files)
        if parts is None:
            raise ValueError(
                f"{self._checkpoint.path} has no tensor for {parameter}; the download is incomplete or config.json "
                "belongs to another model"
            )
        return parts

    def _copy_rest(self) -> None:
        """Write the other tensors and files of the checkpoint."""
        for name in sorted(set(self._checkpoint.files) - self._replaced):
            tensor = self._checkpoint.read_parts([StoredPart(name)])
            is_linear = tensor.dim() == 2 and name.endswith(".weight") and "layers." in name
            if is_linear and name not in self._summary.kept:
                self._summary.kept.append(name)
            self._writer.add(name, tensor)
        ignored = ["lm_head", *(name.removesuffix(".weight") for name in self._summary.kept)]
        self._writer.finish(self._checkpoint.path, self._recipe, ignored)


def _find_norm(layer: DecoderLayer, linear: str) -> str | None:
    """Return the name of the norm whose output only this linear layer reads, or None."""
    reads_norm = {
        "attention.qkv": ("attention_in", isinstance(layer.attention, SelfAttention)),
        "mlp.gate_up": ("mlp_in", isinstance(layer.mlp, Mlp)),
    }
    norm, is_only = reads_norm.get(linear, ("", False))
    return norm if is_only and isinstance(layer.get_submodule(norm), RmsNorm) else None
