"""Builder of an adapter's weights: the stored tensors, combined with the matrices of the model that they change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from argosy.engine.execution.adapters.peft_config import AdapterError, PeftConfig
from argosy.engine.execution.adapters.peft_reader import (
    ModuleTensors,
    StoredAdapter,
    is_finite,
    strip_prefix,
)
from argosy.engine.execution.architectures.decoder_families import FAMILIES
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.torch.lora import (
    AdapterWeights,
    LinearUpdate,
    OutputRun,
    TokenRows,
)
from argosy.engine.execution.layers.modules import Projection, StoredMatrix

EMBEDDING, HEAD = "embed_tokens", "lm_head"


def family_prefixes(decoder: Decoder) -> tuple[str, ...]:
    """Return the prefixes of the names of a decoder's modules."""
    return FAMILIES[decoder.architecture.architecture].prefixes


def build_adapter(adapter: StoredAdapter, decoder: Decoder, device: Device) -> AdapterWeights:
    """Combine an adapter with the model that it was trained for.

    Raises:
        AdapterError: A tensor does not fit the model, or is missing. The message names the module.
    """
    builder = _Builder(adapter.config, decoder, device)
    return builder.build(adapter.modules)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of the matrix of a linear layer that is one module in the format of transformers."""

    projection: Projection
    stored: StoredMatrix
    start: int
    """Number of the matrix's rows before those of the part."""
    size: int
    """Number of rows."""


@dataclass(slots=True)
class _LinearBuilder:
    """Update of one linear layer, of which modules are added one after the other."""

    num_outputs: int
    order: Tensor | None
    """[N], row of the stored matrix of each output. None is the same order."""
    a: list[Tensor] = field(default_factory=list)
    runs: list[OutputRun] = field(default_factory=list)
    gain: Tensor | None = None
    offset: Tensor | None = None

    def add(self, part: _Part, a: Tensor, b: Tensor, factors: _Factors) -> None:
        """Add a module with A [ranks, K] and B [rows of the part, ranks]."""
        first_rank = sum(map(len, self.a))
        self.a.append(a)
        outputs: Tensor | slice = slice(part.start, part.start + part.size)
        rows: Tensor | slice = slice(None)
        if self.order is None:
            self.runs.append(OutputRun(part.start, first_rank, b))
        else:
            inside = (self.order >= part.start) & (self.order < part.start + part.size)
            outputs = inside.nonzero().flatten()
            rows = self.order[outputs] - part.start
            ends = ((outputs.diff() != 1).nonzero().flatten() + 1).tolist()
            for run, run_rows in zip(
                outputs.tensor_split(ends), rows.tensor_split(ends), strict=True
            ):
                self.runs.append(OutputRun(int(run[0]), first_rank, b[run_rows]))
        if factors.gain is not None:
            self.gain = torch.ones(self.num_outputs) if self.gain is None else self.gain
            self.gain[outputs] = factors.gain[rows]
        if factors.offset is not None:
            self.offset = torch.zeros(self.num_outputs) if self.offset is None else self.offset
            self.offset[outputs] = factors.offset[rows]

    def build(self) -> LinearUpdate:
        """Return the update of all modules."""
        return LinearUpdate(torch.cat(self.a), tuple(self.runs), self.gain, self.offset)


@dataclass(frozen=True, slots=True)
class _Factors:
    """Gain and offset of a module's outputs, [N] float32 in the order of the checkpoint."""

    gain: Tensor | None = None
    offset: Tensor | None = None


class _Builder:
    def __init__(self, config: PeftConfig, decoder: Decoder, device: Device) -> None:
        self._config = config
        self._decoder = decoder
        self._device = device
        self._dtype = decoder.dtype
        self._prefixes = family_prefixes(decoder)
        self._parts = dict(self._find_parts())
        self._linears: dict[int, _LinearBuilder] = {}

    def _find_parts(self) -> Iterator[tuple[str, _Part]]:
        """Yield the modules that an adapter can change, by their names without prefix."""
        for projection in self._decoder.adaptable:
            stored = projection.stored
            if stored is None:
                continue
            if projection is self._decoder.head:
                ((_, rows),) = stored.parts
                yield HEAD, _Part(projection, stored, 0, rows)
                continue
            start = 0
            for name, rows in stored.parts:
                module = strip_prefix(name.removesuffix(".weight"), self._prefixes)
                yield module, _Part(projection, stored, start, rows)
                start += rows

    def build(self, modules: dict[str, ModuleTensors]) -> AdapterWeights:
        self._check_agreement(modules)
        update = None
        for name, module in modules.items():
            if module.a is None and module.b is None:
                self._check_no_rest(name, module)
            elif name == EMBEDDING:
                update = self._build_embedding_update(module)
            else:
                self._add_linear(name, module)
        embedding, head = (self._build_rows(name, modules.get(name)) for name in (EMBEDDING, HEAD))
        head = self._tie_head(embedding, head, modules)
        matrix = head.rows if head.table is None else head.table
        return AdapterWeights(
            linears={number: linear.build() for number, linear in self._linears.items()},
            embedding=embedding,
            embedding_update=update,
            head=head,
            head_linear=None
            if matrix is None
            else self._device.create_linear(matrix.to(self._device.torch_device), None),
        )

    def _check_agreement(self, modules: dict[str, ModuleTensors]) -> None:
        """Check that the settings and the tensors name the same modules."""
        config = self._config
        root = self._find_root(modules)
        for listed in (*config.saved_modules, *config.token_ids):
            if listed.rpartition(".")[2] not in (EMBEDDING, HEAD):
                raise AdapterError(
                    f"modules_to_save or trainable_token_indices names {listed[:80]!r}; only {EMBEDDING} and {HEAD} "
                    "can be whole, or have rows of tokens"
                )
        for name, module in modules.items():
            has_update = module.a is not None or module.b is not None
            if name not in self._parts and name != EMBEDDING:
                raise AdapterError(_describe_refused(name, self._decoder))
            if name not in (EMBEDDING, HEAD) and (
                module.table is not None or module.base is not None
            ):
                raise AdapterError(
                    f"{name} has a whole matrix, which only {EMBEDDING} and {HEAD} can have"
                )
            if has_update and not config.is_targeted(module.path):
                raise AdapterError(
                    f"{name} has tensors, but target_modules and layers_to_transform do not name it"
                )
        for name in self._parts:
            path = name if name == HEAD else f"{root}{name}"
            has_update = name in modules and modules[name].b is not None
            if config.is_targeted(path) and not has_update:
                raise AdapterError(f"{name} is one of the target_modules, but has no tensors")

    def _find_root(self, modules: dict[str, ModuleTensors]) -> str:
        """Return what precedes the names of modules in the model that was trained."""
        for name, module in modules.items():
            if name != HEAD:
                return module.path.removesuffix(name)
        return self._prefixes[0]

    def _check_no_rest(self, name: str, module: ModuleTensors) -> None:
        if module.bias is not None or module.magnitude is not None:
            raise AdapterError(f"{name} has a bias or magnitude without lora_A and lora_B")

    def _add_linear(self, name: str, module: ModuleTensors) -> None:
        """Add the update of a module to that of its linear layer."""
        part = self._parts[name]
        a, b = self._read_pair(name, module, part.size, part.projection.num_inputs)
        scale = self._config.scale_of(module.path)
        projection = part.projection
        if projection.number not in self._linears:
            size = sum(rows for _, rows in part.stored.parts)
            order = projection.row_order
            self._linears[projection.number] = _LinearBuilder(
                size, None if order is None else torch.tensor(order)
            )
        factors = self._compute_factors(name, module, part, scale)
        scaled = self._round(b.float() * scale, name)
        self._linears[projection.number].add(part, self._round(a, name), scaled, factors)

    def _read_pair(
        self, name: str, module: ModuleTensors, outs: int, cols: int
    ) -> tuple[Tensor, Tensor]:
        a, b = module.a, module.b
        if a is None or b is None:
            raise AdapterError(f"{name} has no tensor lora_{'A' if a is None else 'B'}")
        rank = self._config.rank_of(module.path)
        if a.shape != (rank, cols) or b.shape != (outs, rank):
            raise AdapterError(
                f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)} instead of {[rank, cols]} and "
                f"{[outs, rank]}; the adapter belongs to another base model, or r and rank_pattern are wrong"
            )
        return a, b

    def _round(self, tensor: Tensor, name: str) -> Tensor:
        rounded = tensor.to(self._dtype, copy=True)
        if not is_finite(rounded):
            raise AdapterError(f"{name} has values beyond the range of the model's dtype")
        return rounded

    def _compute_factors(
        self, name: str, module: ModuleTensors, part: _Part, scale: float
    ) -> _Factors:
        """Compute the gain of DoRA, or the bias of B."""
        config = self._config
        if (module.bias is not None) != config.lora_bias:
            raise AdapterError(f"{name} and lora_bias do not agree on a bias")
        if (module.magnitude is not None) != config.use_dora:
            raise AdapterError(f"{name} and use_dora do not agree on a lora_magnitude_vector")
        if module.bias is not None:
            self._check_vector(name, module.bias, part.size)
            return _Factors(offset=module.bias.float() * scale)
        if module.magnitude is None or module.a is None or module.b is None:
            return _Factors()
        rows = slice(part.start, part.start + part.size)
        weight = part.stored.read_weight()[rows].float()
        gain = _compute_gain(name, module.magnitude, weight, module.a, module.b, scale)
        bias = part.stored.read_bias()
        return _Factors(gain, None if bias is None else bias[rows].float() * (1.0 - gain))

    def _check_vector(self, name: str, vector: Tensor, size: int) -> None:
        if vector.shape != (size,):
            raise AdapterError(f"{name} has a vector of {list(vector.shape)} instead of {[size]}")

    def _build_embedding_update(self, module: ModuleTensors) -> LinearUpdate:
        """Build the update of the embedding, with A transposed so that a token reads one row."""
        vocab, hidden = self._decoder.embed.weight.shape
        if self._config.lora_bias:
            raise AdapterError(f"{EMBEDDING} cannot have a lora_bias")
        if self._config.ensure_weight_tying and self._decoder.architecture.tied_embeddings:
            raise AdapterError(
                f"ensure_weight_tying ties {EMBEDDING} in target_modules to the head; target lm_head, too, instead"
            )
        a, b = self._read_pair(EMBEDDING, module, hidden, vocab)
        scale = self._config.scale_of(module.path)
        gain = None
        if module.magnitude is not None:
            weight = self._decoder.embed.weight.cpu().float().T
            gain = _compute_gain(EMBEDDING, module.magnitude, weight, a, b, scale)
        rounded_b = self._round(b.float() * scale, EMBEDDING)
        rounded_a = self._round(a.T.contiguous(), EMBEDDING)
        return LinearUpdate(rounded_a, (OutputRun(0, 0, rounded_b),), gain)

    def _build_rows(self, name: str, module: ModuleTensors | None) -> TokenRows:
        """Build the rows of embedding or head that the adapter has itself."""
        config = self._config
        vocab, hidden = self._decoder.embed.weight.shape
        listed = next((ids for key, ids in config.token_ids.items() if key.endswith(name)), None)
        is_saved = any(saved.endswith(name) for saved in config.saved_modules)
        if module is not None and module.base is not None and module.base.shape != (vocab, hidden):
            raise AdapterError(
                f"{name} was trained on a matrix of {list(module.base.shape)} instead of {[vocab, hidden]}; an adapter "
                "cannot change the vocabulary"
            )
        if module is None or (module.table is None and module.token_rows is None):
            is_tied = name == HEAD and self._decoder.architecture.tied_embeddings
            if is_saved or (listed is not None and not is_tied):
                raise AdapterError(
                    f"{name} is in modules_to_save or trainable_token_indices, but has no tensor"
                )
            return TokenRows()
        table, rows = module.table, module.token_rows
        if table is not None:
            if table.shape != (vocab, hidden):
                raise AdapterError(
                    f"{name} has a matrix of {list(table.shape)} instead of {[vocab, hidden]}; an adapter cannot "
                    "change the vocabulary"
                )
            table = self._round(table, name)
            if (
                not is_saved
                and name == EMBEDDING
                and torch.equal(table, self._decoder.embed.weight.cpu())
            ):
                table = None  # PEFT stores the base's embedding beside its update
        if rows is None:
            return TokenRows(table)
        if listed is None or rows.shape != (len(listed), hidden) or max(listed) >= vocab:
            raise AdapterError(
                f"{name} has rows {list(rows.shape)} of tokens that trainable_token_indices does not list"
            )
        ids, order = torch.tensor(listed).sort()
        return TokenRows(table, ids, self._round(rows, name)[order])

    def _tie_head(
        self, embedding: TokenRows, head: TokenRows, modules: dict[str, ModuleTensors]
    ) -> TokenRows:
        """Return the rows of the head, which are those of the embedding where PEFT ties them."""
        own = modules.get(HEAD)
        has_own = own is not None and (own.table is not None or own.token_rows is not None)
        if has_own or not self._decoder.architecture.tied_embeddings:
            return head
        if embedding.ids is not None:
            return TokenRows(None, embedding.ids, embedding.rows)
        return embedding if self._config.ensure_weight_tying else head


def _compute_gain(
    name: str, magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Return m / ||W + s B A|| for each output (DoRA), float32 [N], without the dense sum.

    The square of the norm is ||W||^2 + 2 s B (A W^T) + s^2 B (A A^T) B^T.
    """
    if magnitude.numel() != len(weight):
        raise AdapterError(f"{name} has {magnitude.numel()} magnitudes instead of {len(weight)}")
    a, b = a.float(), b.float() * scale
    squares = weight.square().sum(1)
    squares += 2 * (b * (weight @ a.T)).sum(1) + (b @ (a @ a.T)).mul_(b).sum(1)
    gain = magnitude.float().flatten() / squares.clamp_(min=0.0).sqrt_()
    if not bool(gain.isfinite().all()):
        raise AdapterError(f"{name} has rows of norm 0, which DoRA cannot scale")
    return gain


def _describe_refused(name: str, decoder: Decoder) -> str:
    """Return why a module cannot have an adapter."""
    if ".experts" in name or name.endswith(("mlp.gate", "mlp.router", "block_sparse_moe.gate")):
        return f"{name} belongs to a mixture of experts, of which only the shared expert can have an adapter"
    if name.endswith("kv_b_proj"):
        return f"{name} is absorbed into queries and outputs, so that it cannot have an adapter"
    return (
        f"{name} is no module of {decoder.architecture.architecture} that can have an adapter; the adapter belongs to "
        "another base model, or it changes norms or a vision tower"
    )
