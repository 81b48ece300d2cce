"""Loader of a checkpoint's weights into a decoder or an encoder, which maps, fuses, checks and packs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import structlog
import torch
from torch import Tensor, nn

from argosy.engine.engine_config import QuantizeSetting, WeightFormat
from argosy.engine.execution.architectures.checkpoint_tensors import (
    EMBEDDING,
    HEAD,
    OwnArchitecture,
    assign_tensors,
    find_parts,
)
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.draft_head import DraftHeadArchitecture
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedSource,
    GroupedWeight,
    concatenate,
    select_rows,
)
from argosy.engine.execution.checkpoint_formats.quantization import quantize_weight
from argosy.engine.execution.checkpoint_formats.reader import (
    CheckpointReader,
    EncodedMatrix,
    StoredPart,
)
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.decoders.draft_head import DraftHead
from argosy.engine.execution.encoders.encoder import Encoder
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackCache
from argosy.engine.execution.layers.modules import LoadableModule, Projection, StoredMatrix

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

VOCABULARY_MAP = "d2t"
"""Tensor of an EAGLE-3 head that maps its tokens to those of the target."""


def load_decoder(
    checkpoint: CheckpointReader,
    architecture: ModelArchitecture,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: QuantizeSetting | None = None,
    pack_cache: PackCache | None = None,
) -> Decoder:
    """Build the decoder of `architecture` with the weights of a checkpoint.

    Weights that the pack cache has are not read. Peak memory is the packed weights plus one matrix. The embedding stays
    mapped from the file if it is stored in `dtype`.

    `progress` is called with the finished fraction. `quantize` None computes with quantized weights as they are stored,
    and keeps others in `dtype`, and "none" dequantizes them. Without a `pack_cache`, weights are packed in memory.

    Raises:
        ValueError: A tensor is missing, damaged, not finite or of the wrong shape, or would not be read. The message
            names file and tensor. Also raised if the device does not support the format `quantize`.
    """
    is_tied = architecture.tied_embeddings
    if architecture.has_head:
        is_tied = _is_head_tied(checkpoint, architecture)
    if not architecture.has_head:
        head = "none"
    elif is_tied:
        head = "tied"
    else:
        head = "differs from the tied embedding" if architecture.tied_embeddings else "separate"
    architecture = replace(architecture, tied_embeddings=is_tied)
    decoder = Decoder(architecture, device, dtype, None if quantize == "none" else quantize)
    loader = _Loader(checkpoint, device, dtype, quantize is None, pack_cache or PackCache())
    loader.load(decoder, architecture, progress, head)
    _warn_of_long_factors(architecture)
    decoder.checkpoint = checkpoint.path
    return decoder


def load_encoder(
    checkpoint: CheckpointReader,
    architecture: EncoderArchitecture,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: WeightFormat | None = None,
    pack_cache: PackCache | None = None,
) -> Encoder:
    """Build the encoder of `architecture` with the weights of a checkpoint.

    The arguments and errors are those of `load_decoder`. None as `quantize` keeps weights in `dtype`.
    """
    encoder = Encoder(architecture, device, quantize)
    loader = _Loader(
        checkpoint, device, dtype, keeps_stored_format=False, pack_cache=pack_cache or PackCache()
    )
    head = "none" if architecture.classifier is None else "classifier"
    loader.load(encoder, architecture, progress, head)
    return encoder


def load_draft_head(
    checkpoint: CheckpointReader,
    architecture: DraftHeadArchitecture,
    target: Decoder,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: QuantizeSetting | None = None,
    pack_cache: PackCache | None = None,
) -> DraftHead:
    """Build the draft head of `architecture` for a target, with the weights of a checkpoint.

    The other arguments and errors are those of `load_decoder`.
    """
    head = DraftHead(architecture, target, device, dtype, None if quantize == "none" else quantize)
    loader = _Loader(checkpoint, device, dtype, quantize is None, pack_cache or PackCache())
    loader.load(head, architecture, progress, "separate" if architecture.has_head else "shared")
    if architecture.method == "eagle3" and VOCABULARY_MAP in checkpoint.files:
        head.target_tokens = _read_vocabulary_map(checkpoint, architecture)
    return head


def _read_vocabulary_map(
    checkpoint: CheckpointReader, architecture: DraftHeadArchitecture
) -> list[int]:
    """Return the target's token for each of a head, which stores the differences."""
    offsets = checkpoint.read_integers(VOCABULARY_MAP)
    size = architecture.draft_vocab_size
    tokens: list[int] = (
        (offsets + torch.arange(len(offsets))).tolist() if offsets.dim() == 1 else []
    )
    if len(tokens) != size or min(tokens) < 0 or max(tokens) >= architecture.vocab_size:
        raise ValueError(
            f"{checkpoint.path}: {VOCABULARY_MAP} does not map {size} tokens to those of the model; "
            "config.json and the weights belong to different models"
        )
    return tokens


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loader of a model's modules, one after the other."""

    checkpoint: CheckpointReader
    device: Device
    dtype: torch.dtype
    keeps_stored_format: bool
    """Whether matrices are computed with as they are stored, if their format allows it."""
    pack_cache: PackCache
    parts: dict[str, tuple[StoredPart, ...]] = field(default_factory=dict)
    """Stored parts of each parameter."""
    formats: Counter[str] = field(default_factory=Counter)
    """Number of matrices in each format."""

    def load(
        self,
        model: nn.Module,
        architecture: OwnArchitecture,
        progress: Callable[[float], None],
        head: str,
    ) -> None:
        """Load all modules. `progress` is called with the finished fraction, 0 to 1. `head` describes the head."""
        checkpoint = self.checkpoint
        parameters = [name for name, _ in model.named_parameters()]
        parts, unused = assign_tensors(checkpoint.path, checkpoint.files, architecture, parameters)
        self.parts.update(parts)
        num_total = sum(parameter.numel() for parameter in model.parameters())
        num_done = 0
        progress(0.0)
        for name, module in _children_first(model):
            if isinstance(module, LoadableModule):
                num_done += sum(declared.numel() for declared in module.parameters(recurse=False))
                self.load_module(name, module)
                progress(num_done / num_total)
        log.info(
            "checkpoint_loaded",
            path=str(checkpoint.path),
            architecture=architecture.architecture,
            parameters=architecture.num_parameters,
            head=head,
            stored_format=checkpoint.stored_format,
            matrices=dict(self.formats),
            unused_tensors=[*unused, *checkpoint.ignored],
            ropes=[rope.describe(architecture.max_model_len) for rope in architecture.ropes],
            eos_token_ids=list(architecture.eos_token_ids),
        )

    def load_module(self, name: str, module: LoadableModule) -> None:
        """Assign the parameters of a module, and pack its matrix."""
        weight = f"{name}.weight"
        is_kept = isinstance(module, Projection) and self._is_kept(weight, module)
        for own_name, declared in list(module.named_parameters(recurse=False)):
            if not (is_kept and own_name == "weight"):
                setattr(module, own_name, self._read(f"{name}.{own_name}", declared, module))
        if isinstance(module, Projection):
            module.stored = self._describe_stored(
                name, module, None if is_kept else module.weight_format
            )
        if not isinstance(module, Projection):
            module.process_weights_after_loading(self.device)
        elif is_kept:
            self._set_stored_linear(weight, module)
        else:
            self.formats[module.weight_format or str(self.dtype).removeprefix("torch.")] += 1
            get_packed = partial(self.pack_cache.get, weight)
            module.process_weights_after_loading(self.device, get_packed)

    def _is_kept(self, weight: str, module: Projection) -> bool:
        """Return whether the kernels compute with the stored integers of a matrix, at least of some of its rows."""
        if not self.keeps_stored_format or module.weight is None:
            return False
        self.checkpoint.check_shape(self.parts[weight], tuple(module.weight.shape))
        return any(map(self.checkpoint.find_encoded, self.parts[weight]))

    def _describe_stored(
        self, name: str, module: Projection, weight_format: WeightFormat | None
    ) -> StoredMatrix:
        """Return how to read the matrix of a linear layer again, rounded to `weight_format`."""
        checkpoint, parts = self.checkpoint, self.parts[f"{name}.weight"]
        bias_parts = None if module.bias is None else self.parts[f"{name}.bias"]

        def read_weight() -> Tensor:
            weight = checkpoint.read_parts(parts)
            if weight_format not in ("int8", "int4"):
                return weight
            return torch.cat([q.dequantize() for q in quantize_weight(weight, weight_format)])

        return StoredMatrix(
            tuple((part.name, checkpoint.part_shape(part)[0]) for part in parts),
            read_weight,
            lambda: None if bias_parts is None else checkpoint.read_parts(bias_parts),
        )

    def _set_stored_linear(self, weight: str, module: Projection) -> None:
        compute, formats = create_encoded_linear(
            self.checkpoint,
            self.parts[weight],
            module.bias,
            self.device,
            dtype=module.dtype or self.dtype,
            pack_cache=self.pack_cache,
            pack_key=weight,
            row_order=module.row_order,
        )
        self.formats.update(formats)
        module.set_linear(compute)

    def _read(self, parameter: str, declared: nn.Parameter, module: LoadableModule) -> nn.Parameter:
        """Read a parameter. It stays on `meta` if the pack cache has it."""
        dtype = module.dtype or self.dtype
        if parameter in self.pack_cache:
            return nn.Parameter(declared.to(dtype), requires_grad=False)
        parts = self.parts[parameter]
        stored = self.checkpoint.read_tensor(parts, tuple(declared.shape))
        tensor = stored.to(device=self.device.torch_device, dtype=dtype, copy=stored.dim() == 1)
        if not self.pack_cache.is_stored:
            self.checkpoint.check_finite(parts, tensor)
        return nn.Parameter(tensor, requires_grad=False)


def load_submodule(
    checkpoint: CheckpointReader,
    model: nn.Module,
    name: str,
    parts: Mapping[str, tuple[StoredPart, ...]],
    device: Device,
    dtype: torch.dtype,
) -> None:
    """Load the submodule `name` of a model, with matrices in `dtype`. `parts` are the stored parts of its parameters.

    Raises:
        ValueError: A tensor is damaged, not finite or of the wrong shape. The message names file and tensor.
    """
    loader = _Loader(
        checkpoint,
        device,
        dtype,
        keeps_stored_format=False,
        pack_cache=PackCache(),
        parts=dict(parts),
    )
    for full_name, module in _children_first(model.get_submodule(name), name):
        if isinstance(module, LoadableModule):
            loader.load_module(full_name, module)


def _children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of a module and of all below it, each after its children."""
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _warn_of_long_factors(architecture: ModelArchitecture) -> None:
    for rope in architecture.ropes:
        if rope.uses_long_factors(architecture.max_model_len):
            log.warning(
                "rope_long_factors_in_use",
                max_model_len=architecture.max_model_len,
                short_factors_up_to=rope.original_max_len,
                remedy=f"set --max-model-len {rope.original_max_len} if no prompt is longer",
            )


def _is_head_tied(checkpoint: CheckpointReader, architecture: ModelArchitecture) -> bool:
    """Return whether the output matrix is the embedding.

    A stored head that differs is used, although config.json says `tie_word_embeddings`. transformers does the same.
    """
    if not architecture.tied_embeddings:
        return False
    untied = replace(architecture, tied_embeddings=False)
    embedding, head = (find_parts(untied, name, checkpoint.files) for name in (EMBEDDING, HEAD))
    if embedding is None or head is None:
        return True
    return torch.equal(checkpoint.read_parts(embedding), checkpoint.read_parts(head))


def create_encoded_linear(
    checkpoint: CheckpointReader,
    parts: Sequence[StoredPart],
    bias: Tensor | None,
    device: Device,
    *,
    dtype: torch.dtype,
    pack_cache: PackCache,
    pack_key: str,
    row_order: Sequence[int] | None = None,
) -> tuple[Callable[[Tensor], Tensor], list[str]]:
    """Create a linear layer whose rows are those of the parts, with the integers that the checkpoint stores.

    Neighbouring parts of the same format are one matrix. Parts that the kernels cannot use are dequantized to `dtype`.
    The bias is in the order of the checkpoint, in which `row_order` has the row of each output.

    Returns:
        Function that maps x [T, K] to [T, N], and the format of each run of rows, such as `int4 per 128`.

    Raises:
        ValueError: A part is damaged.
    """
    matrices = [checkpoint.find_encoded(part) for part in parts]
    runs = _find_runs(matrices)
    order = None if row_order is None else torch.tensor(row_order)
    packed_order = order if len(runs) == 1 else None
    if bias is not None and packed_order is not None:
        bias = bias[packed_order]
    computes: list[Callable[[Tensor], Tensor]] = []
    formats: list[str] = []
    start = 0
    for number, (first, last) in enumerate(runs):
        rows = sum(checkpoint.part_shape(part)[0] for part in parts[first:last])
        run_bias = None if bias is None else bias[start : start + rows]
        start += rows
        get_packed = partial(pack_cache.get, f"{pack_key}#{number}" if len(runs) > 1 else pack_key)
        matrix = matrices[first]
        if matrix is None:
            stored = checkpoint.read_parts(parts[first:last])
            weight = stored.to(device=device.torch_device, dtype=dtype)
            checkpoint.check_finite(parts[first:last], weight)
            computes.append(device.create_linear(weight, run_bias, None, get_packed))
            formats.append(str(dtype).removeprefix("torch."))
            continue
        run = [each for each in matrices[first:last] if each is not None]
        source = GroupedSource(
            matrix.format, (rows, matrix.shape[1]), partial(_read_run, run, packed_order)
        )
        compute = device.create_group_linear(source, run_bias, get_packed)
        columns = matrix.column_order()
        if columns is not None:
            compute = _reorder_input(compute, columns.to(device.torch_device))
        computes.append(compute)
        formats.append(matrix.format.describe())
    if len(computes) == 1:
        return computes[0], formats
    order = None if order is None else order.to(device.torch_device)
    return _concatenate_outputs(computes, order), formats


def _find_runs(matrices: Sequence[EncodedMatrix | None]) -> list[tuple[int, int]]:
    """Return first and last index + 1 of neighbours that can be one matrix."""
    keys: list[int] = []
    for index, matrix in enumerate(matrices):
        joins = index > 0 and _can_join(matrices[index - 1], matrix)
        keys.append(keys[-1] if joins else index)
    return [(key, key + len(list(group))) for key, group in groupby(keys)]


def _can_join(a: EncodedMatrix | None, b: EncodedMatrix | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.format != b.format or a.shape[1] != b.shape[1]:
        return False
    first, second = a.column_order(), b.column_order()
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _read_run(matrices: Sequence[EncodedMatrix], order: Tensor | None) -> GroupedWeight:
    weight = concatenate([matrix.read() for matrix in matrices])
    return weight if order is None else select_rows(weight, order)


def _reorder_input(
    compute: Callable[[Tensor], Tensor], columns: Tensor
) -> Callable[[Tensor], Tensor]:
    return lambda x: compute(x.index_select(1, columns))


def _concatenate_outputs(
    computes: Sequence[Callable[[Tensor], Tensor]], order: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Concatenate the outputs of layers with the same input, and then order them."""

    def compute(x: Tensor) -> Tensor:
        outputs = torch.cat([part(x) for part in computes], 1)
        return outputs if order is None else outputs.index_select(1, order)

    return compute
