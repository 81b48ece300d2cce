"""Assignment of a checkpoint's stored tensors to the model's parameters, which accounts for every stored tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_families import FAMILIES, WeightNames
from argosy.engine.execution.architectures.draft_head import DraftHeadArchitecture
from argosy.engine.execution.architectures.encoder import (
    ENCODER_FAMILIES,
    EncoderArchitecture,
    encoder_tensor_names,
)
from argosy.engine.execution.checkpoint_formats.reader import StoredPart

OwnArchitecture = ModelArchitecture | EncoderArchitecture

EMBEDDING = "embed.weight"
HEAD = "head.weight"
MAX_LISTED_TENSORS = 8
"""Maximum number of tensors that an error lists."""
_UNUSED_BUFFERS = r"(.*\.)?rotary_emb\.(original_)?inv_freq$"
"""Frequencies of the rotary embedding, which older checkpoints store and config.json determines."""


def assign_tensors(
    path: Path,
    files: Mapping[str, Path],
    architecture: OwnArchitecture,
    parameters: Iterable[str],
) -> tuple[dict[str, tuple[StoredPart, ...]], list[str]]:
    """Find the stored tensors of each parameter of a model.

    Returns:
        The parts whose concatenated rows are each parameter, and the stored tensors that the model does not need.

    Raises:
        ValueError: A tensor is missing, or a stored tensor would not be read although it may change the results.
    """
    parts = {
        name: find_parts(architecture, name, files) or _raise_missing(path, architecture, name)
        for name in parameters
    }
    unread = set(files).difference(part.name for found in parts.values() for part in found)
    if isinstance(architecture, DraftHeadArchitecture):  # the target reads the others
        unread = {name for name in unread if name.startswith(architecture.tensor_prefix)}
    patterns = (_UNUSED_BUFFERS, *unused_tensor_patterns(architecture))
    unused = {name for name in unread if any(re.match(pattern, name) for pattern in patterns)}
    if (
        architecture.tied_embeddings and architecture.has_head
    ):  # a head that differs from the embedding is not tied
        unused |= unread.intersection(
            name for (name,) in checkpoint_tensor_names(architecture, HEAD)
        )
    if unread > unused:
        _raise_unread(path, files, architecture, sorted(unread - unused))
    return parts, sorted(unused)


def find_parts(
    architecture: OwnArchitecture, parameter: str, stored_names: Iterable[str]
) -> tuple[StoredPart, ...] | None:
    """Return the parts of a parameter, or None if the checkpoint does not have them.

    If the embedding is also the head, either may be stored, as in transformers.
    """
    sources = [parameter]
    if architecture.tied_embeddings and architecture.has_head and parameter in (EMBEDDING, HEAD):
        sources = [EMBEDDING, HEAD]
    for source in sources:
        for texts in checkpoint_tensor_names(architecture, source):
            parts = tuple(map(StoredPart.parse, texts))
            if all(part.name in stored_names for part in parts):
                return parts
    return None


def checkpoint_tensor_names(
    architecture: OwnArchitecture, parameter: str
) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives in which a checkpoint may store a parameter of the model, most common first.

    An alternative names the tensors whose concatenated rows are the parameter. `name[i]` is entry i of the tensor
    `name`.
    """
    if isinstance(architecture, EncoderArchitecture):
        return encoder_tensor_names(architecture, parameter)
    if isinstance(architecture, DraftHeadArchitecture):
        return _module_tensor_names(parameter, architecture.names, ("",))
    family = FAMILIES[architecture.architecture]
    # Embedding models store the decoder without a head, under names without a prefix.
    prefixes = family.prefixes if architecture.has_head else (*family.prefixes, "")
    module, _, kind = parameter.rpartition(".")
    if module in ("embed", "head", "norm"):
        stored = {"embed": "embed_tokens", "head": "lm_head", "norm": "norm"}[module]
        if module == "head":
            return tuple(
                (f"{prefix.removesuffix('model.')}lm_head.{kind}",) for prefix in family.prefixes
            )
        return tuple((f"{prefix}{stored}.{kind}",) for prefix in prefixes)
    _, layer, weight_name = parameter.split(".", 2)
    layer_prefixes = tuple(f"{prefix}layers.{layer}." for prefix in prefixes)
    return _module_tensor_names(weight_name, family.weight_names, layer_prefixes)


def unused_tensor_patterns(
    architecture: OwnArchitecture,
) -> tuple[str, ...]:
    """Return patterns of stored tensors that the model does not need."""
    if isinstance(architecture, EncoderArchitecture):
        return ENCODER_FAMILIES[architecture.family].unused_tensors
    if isinstance(architecture, DraftHeadArchitecture):
        return architecture.unused_tensors
    patterns = FAMILIES[architecture.architecture].unused_tensors
    if not architecture.has_head:
        patterns += (r"(.*\.)?lm_head\.", r"score\.")  # the pooler reads what it needs of them
    return tuple(
        pattern.replace("{num_layers}", str(architecture.num_layers)) for pattern in patterns
    )


def _module_tensor_names(
    parameter: str, names: WeightNames, prefixes: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives in which a checkpoint may store a parameter, by the names of modules.

    The number of an expert is not part of the module's name.
    """
    expert = ""
    head, separator, tail = parameter.partition("mlp.experts.")
    if separator:
        expert, _, tail = tail.partition(".")
        parameter = f"{head}{separator}{tail}"
    if parameter in names:
        return tuple(
            tuple(f"{prefix}{part}" for part in parts)
            for prefix in prefixes
            for parts in names[parameter]
        )
    module, _, kind = parameter.rpartition(".")
    return tuple(
        tuple(_tensor_name(f"{prefix}{part}", expert, kind) for part in parts)
        for prefix in prefixes
        for parts in names[module]
    )


def _tensor_name(part: str, expert: str, kind: str) -> str:
    """Return a part's full tensor name. A tensor that holds all experts has no `.weight` suffix."""
    if "[{e}]" not in part:
        return f"{part.replace('{e}', expert)}.{kind}"
    if kind == "bias":
        part = part.removesuffix(".T").replace("[", "_bias[")
    return part.replace("{e}", expert)


def _raise_missing(
    path: Path, architecture: OwnArchitecture, parameter: str
) -> tuple[StoredPart, ...]:
    alternatives = checkpoint_tensor_names(architecture, parameter)
    expected = " or ".join(" + ".join(parts) for parts in alternatives)
    raise ValueError(
        f"{path} has no tensor {expected}; "
        "the download is incomplete or config.json belongs to another model"
    )


def _raise_unread(
    path: Path, files: Mapping[str, Path], architecture: OwnArchitecture, names: list[str]
) -> None:
    stored_in = ", ".join(sorted({files[name].name for name in names[:MAX_LISTED_TENSORS]}))
    raise ValueError(
        f"{path}: {list_names(names)} in {stored_in} would not be read, because a "
        f"{architecture.architecture} with the settings of config.json has no such tensors; "
        "correct config.json, or remove the tensors if the model does not need them"
    )


def list_names(names: list[str]) -> str:
    """Return the first names, and the number of the others, for an error."""
    listed = ", ".join(names[:MAX_LISTED_TENSORS])
    if len(names) > MAX_LISTED_TENSORS:
        listed += f" and {len(names) - MAX_LISTED_TENSORS} others"
    return listed
