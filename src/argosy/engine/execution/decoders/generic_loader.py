"""Loader of weights into a model of transformers, whose matrix products it packs while it reads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.checkpoint_tensors import list_names
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.decoders.generic_decoder import (
    GenericDecoder,
    GenericModel,
    PackedLinear,
    pack_experts,
)
from argosy.engine.execution.decoders.transformers_library import (
    TensorEntry,
    fp32_patterns,
    is_linear,
    is_transposed_linear,
    map_stored_tensors,
    materialize_buffers,
    merges_experts,
)
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackCache
from argosy.engine.execution.kernels.torch.rowwise_ops import use_rowwise_ops
from argosy.engine.execution.layers.modules import weight_format_for

_UNUSED_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.(original_)?inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)
"""Frequencies and masks that older checkpoints store and config.json determines."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def load_generic_decoder(
    model: GenericModel,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: WeightFormat | None = None,
    pack_cache: PackCache | None = None,
) -> GenericDecoder:
    """Read the weights of a model that was built in `dtype`. The model must not be loaded twice.

    Weights that the pack cache has are not read. Peak memory is the packed weights plus one matrix. The embedding stays
    mapped from the file if it is stored in `dtype`. Quantized matrices are dequantized before they are packed.

    Raises:
        ValueError: A tensor is missing, damaged, not finite or of the wrong shape, or would not be read. The message
            names file and tensor. Also raised if the device does not support the format `quantize`.
    """
    loader = _Loader(model, device, dtype, quantize, pack_cache or PackCache())
    materialize_buffers(model, loader.modules, device.torch_device)
    loader.load(progress)
    for module in model.trace.inexact_modules:
        use_rowwise_ops(module)
    architecture = model.architecture
    log.info(
        "checkpoint_loaded",
        path=str(model.path),
        architecture=architecture.architecture,
        parameters=architecture.num_parameters,
        head="tied" if loader.is_head_tied else "separate",
        stored_format=loader.stored_format,
        unused_tensors=loader.num_unused,
        rowwise_modules=sorted({type(module).__name__ for module in model.trace.inexact_modules}),
        unchecked_functions=model.trace.unreplaced_functions,
        eos_token_ids=list(architecture.eos_token_ids),
    )
    return GenericDecoder(model, device, dtype)


class _Loader:
    """Assigns the stored tensors of one checkpoint. A module is finished when it has all of its own tensors."""

    def __init__(
        self,
        model: GenericModel,
        device: Device,
        dtype: torch.dtype,
        quantize: WeightFormat | None,
        pack_cache: PackCache,
    ) -> None:
        self.modules = model.trace.used_modules
        self.is_head_tied = False
        self.num_unused = 0
        self._model = model
        self._device = device
        self._quantize = quantize
        self._pack_cache = pack_cache
        self._checkpoint = CheckpointReader(model.path)
        self.stored_format = self._checkpoint.stored_format
        self._declared: dict[str, Tensor] = {}
        """Parameters and stored buffers of the used modules, which are on `meta`."""
        self._fp32_names = re.compile("|".join(fp32_patterns(model.module, dtype)) or "(?!)")
        state = set(model.module.state_dict())
        for module_name, module in self.modules.items():
            for name, tensor in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                full_name = f"{module_name}.{name}" if module_name else name
                if full_name in state:
                    self._declared[full_name] = tensor
        self._expert_names = {
            name for name, module in self.modules.items() if module in set(model.trace.experts)
        }
        self._received: dict[str, dict[str, Tensor]] = {}
        self._expert_entries: dict[str, dict[str, TensorEntry]] = {}
        self._whole_experts: dict[str, Tensor] = {}
        """3-D parameters of the module that is being packed, if they cannot be read by expert."""
        self._head = model.module.get_output_embeddings()

    def load(self, progress: Callable[[float], None]) -> None:
        """Read all entries and finish all modules.

        Raises:
            ValueError: The checkpoint does not fit the model.
        """
        entries, unexpected = map_stored_tensors(self._model.module, list(self._checkpoint.files))
        self._reject_unread([name for name in unexpected if not _UNUSED_BUFFERS.fullmatch(name)])
        used = [entry for entry in entries if entry.converter or entry.target in self._declared]
        stored = {entry.target for entry in used}
        self.num_unused = len(entries) - len(used) + len(unexpected)
        progress(0.0)
        for number, entry in enumerate(used):
            module_name, _, name = entry.target.rpartition(".")
            if module_name in self._expert_names:
                self._expert_entries.setdefault(module_name, {})[name] = entry
                self._finish_experts(module_name)
            else:
                for target, tensor in self._read_entry(entry).items():
                    self._deliver(target, tensor, entry)
                    for alias in self._aliases(target):
                        if alias not in stored:
                            self.is_head_tied = True
                            self._deliver(alias, tensor, entry)
            progress((number + 1) / len(used))
        self._reject_missing()
        self._drop_unused()

    # --- reading -----------------------------------------------------------------------------------

    def _read_entry(self, entry: TensorEntry) -> dict[str, Tensor]:
        """Return the parameters that an entry makes. Packed ones that the cache has are on `meta`."""
        if entry.converter is None:
            declared = self._declared[entry.target]
            is_used_packed_only = not any(
                isinstance(self.modules[name.rpartition(".")[0]], nn.Embedding)
                for name in (entry.target, *self._aliases(entry.target))
            )
            if entry.target in self._pack_cache and is_used_packed_only:
                return {entry.target: declared}
            (source,) = next(iter(entry.sources.values()))
            return {entry.target: self._checkpoint.read_parts((StoredPart(source),))}
        return self._convert(
            entry,
            {
                pattern: [self._checkpoint.read_parts((StoredPart(name),)) for name in names]
                for pattern, names in entry.sources.items()
            },
        )

    def _convert(self, entry: TensorEntry, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        converter: Any = copy.deepcopy(entry.converter)
        for pattern, parts in tensors.items():
            for name, tensor in zip(entry.sources[pattern], parts, strict=False):
                converter.add_tensor(entry.target, name, pattern, tensor)
        module = self._model.module
        try:
            converted = converter.convert(entry.target, model=module, config=module.config)
        except Exception as error:
            names = [name for sources in entry.sources.values() for name in sources]
            raise ValueError(
                f"{self._model.path}: {list_names(names)} cannot become {entry.target} ({error}); "
                "config.json and the weights belong to different models"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }

    def _read_expert(self, entry: TensorEntry, expert: int) -> Tensor:
        """Read the part of a 3-D parameter that belongs to one expert."""
        if entry.converter is None:
            (source,) = next(iter(entry.sources.values()))
            return self._checkpoint.read_parts((StoredPart(source, expert),))
        if not merges_experts(entry.converter):
            if entry.target not in self._whole_experts:
                (self._whole_experts[entry.target],) = self._read_entry(entry).values()
            return self._whole_experts[entry.target][expert]
        parts = {}
        for pattern, names in entry.sources.items():
            if expert >= len(names):
                raise ValueError(
                    f"{self._model.path} has {len(names)} experts of {entry.target}, but config.json states more; "
                    "the download is incomplete or config.json belongs to another model"
                )
            parts[pattern] = [self._checkpoint.read_parts((StoredPart(names[expert]),))]
        (tensor,) = self._convert(entry, parts).values()
        return tensor[0]

    # --- assignment --------------------------------------------------------------------------------

    def _deliver(self, target: str, tensor: Tensor, entry: TensorEntry) -> None:
        """Give a tensor to its module, and finish the module if it was the last one."""
        declared = self._declared.get(target)
        if declared is None:
            return
        converted = self._to_declared(target, tensor, declared, entry)
        module_name, _, name = target.rpartition(".")
        received = self._received.setdefault(module_name, {})
        received[name] = converted
        if len(received) == len(self._own_names(module_name)):
            self._finish(module_name, self._received.pop(module_name))

    def _to_declared(
        self, target: str, tensor: Tensor, declared: Tensor, entry: TensorEntry
    ) -> Tensor:
        sources = [name for names in entry.sources.values() for name in names]
        if tensor.shape != declared.shape:
            raise ValueError(
                f"{self._model.path}: {list_names(sources)} give {target} the shape {list(tensor.shape)}, "
                f"but it should have {list(declared.shape)}; config.json and the weights belong to different models"
            )
        dtype = torch.float32 if self._fp32_names.search(target) else declared.dtype
        if tensor.device.type == "meta":
            return tensor.to(dtype)
        converted = tensor.to(device=self._device.torch_device, dtype=dtype, copy=tensor.dim() == 1)
        if not self._pack_cache.is_stored:
            self._checkpoint.check_finite(tuple(StoredPart(name) for name in sources), converted)
        return converted

    def _finish(self, module_name: str, tensors: dict[str, Tensor]) -> None:
        """Pack a linear layer, or assign the tensors of another module."""
        module = self.modules[module_name]
        if is_linear(module):
            weight = tensors["weight"]
            if is_transposed_linear(module):
                weight = weight.mT
            weight_format = weight_format_for(
                module_name, self._quantize, is_head=module is self._head
            )
            get_packed = partial(self._pack_cache.get, f"{module_name}.weight")
            linear = self._device.create_linear(
                weight, tensors.get("bias"), weight_format, get_packed
            )
            parent, _, name = module_name.rpartition(".")
            packed = PackedLinear(linear, weight.shape[0])
            setattr(self._model.module.get_submodule(parent), name, packed)
            return
        for name, tensor in tensors.items():
            if name in module._parameters:  # noqa: SLF001 - assigns without copying
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)  # noqa: SLF001
            else:
                module._buffers[name] = tensor  # noqa: SLF001

    def _finish_experts(self, module_name: str) -> None:
        """Pack the experts of a module if all of its entries are known."""
        module: Any = self.modules[module_name]
        entries = self._expert_entries[module_name]
        if len(entries) < len(self._own_names(module_name)):
            return

        def read(name: str, expert: int) -> Tensor:
            declared = self._declared[f"{module_name}.{name}"]
            if f"{module_name}.{name}.{expert}" in self._pack_cache:
                return declared[0]
            tensor = self._read_expert(entries[name], expert)
            return self._to_declared(f"{module_name}.{name}", tensor, declared[0], entries[name])

        def pack(weight: Tensor, bias: Tensor | None, name: str) -> Callable[[Tensor], Tensor]:
            get_packed = partial(self._pack_cache.get, f"{module_name}.{name}")
            return self._device.create_linear(weight, bias, self._quantize, get_packed)

        module.packed_experts = pack_experts(module, read, pack)
        for name in list(module._parameters):  # noqa: SLF001 - releases the declarations
            del module._parameters[name]  # noqa: SLF001
        del self._expert_entries[module_name]
        self._whole_experts.clear()

    def _drop_unused(self) -> None:
        """Drop the declarations of modules that are not loaded. Models take the device of their first parameter."""
        for name, module in self._model.module.named_modules():
            if name not in self.modules:
                for tensors in (module._parameters, module._buffers):  # noqa: SLF001
                    unloaded = [
                        key for key, value in tensors.items() if value is not None and value.is_meta
                    ]
                    tensors.update(dict.fromkeys(unloaded))

    def _own_names(self, module_name: str) -> list[str]:
        """Return the full names of a module's own parameters and stored buffers."""
        prefix = f"{module_name}." if module_name else ""
        module = self.modules[module_name]
        names = [*module._parameters, *module._buffers]  # noqa: SLF001
        return [prefix + name for name in names if prefix + name in self._declared]

    def _aliases(self, target: str) -> list[str]:
        """Return the other names of a parameter that several modules share."""
        declared = self._declared.get(target)
        if declared is None:
            return []
        return [
            name for name, other in self._declared.items() if other is declared and name != target
        ]

    # --- errors ------------------------------------------------------------------------------------

    def _reject_unread(self, names: list[str]) -> None:
        if names:
            raise ValueError(
                f"{self._model.path}: {list_names(names)} would not be read, because a "
                f"{self._model.architecture.architecture} with the settings of config.json has no such tensors; "
                "correct config.json, or remove the tensors if the model does not need them"
            )

    def _reject_missing(self) -> None:
        incomplete = [*self._received, *self._expert_entries]
        unfinished = [
            name
            for name, module in self.modules.items()
            if self._model.module.get_submodule(name) is module
            and any(parameter.is_meta for parameter in module.parameters(recurse=False))
        ]
        if incomplete or unfinished:
            raise ValueError(
                f"{self._model.path} lacks tensors of {list_names(incomplete or unfinished)}; "
                "the download is incomplete or config.json belongs to another model"
            )
