"""Models before they are loaded: the implementation that serves a checkpoint, and the architecture."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.engine.engine_config import ModelImpl, SelectedImpl
from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import (
    read_architecture,
    read_eos_token_ids,
)
from argosy.engine.execution.architectures.decoder_families import FAMILIES
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.architectures.pooling import (
    read_pooling_architecture,
    read_pooling_layout,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.config.checkpoint_config import AUTO_CONFIG, CheckpointConfig
from argosy.extras import install_command

if TYPE_CHECKING:
    import torch

    from argosy.engine.execution.checkpoint_formats.reader import StoredIntegers
    from argosy.engine.execution.decoders.generic_decoder import GenericModel

AnyArchitecture = ModelArchitecture | EncoderArchitecture | GenericArchitecture
"""Architecture of a decoder or an encoder of either implementation."""


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """Implementation that serves a checkpoint, and the reason for the choice."""

    implementation: SelectedImpl
    reason: str


def select_implementation(path: Path, model_impl: ModelImpl) -> ModelSelection:
    """Choose the implementation for the checkpoint in `path`. `auto` prefers Argosy's own decoder.

    Raises:
        ValueError: Neither implementation serves the model. The message says what to do.
    """
    file, values = read_config_values(path)
    names = values.get("architectures")
    own = [name for name in names if name in FAMILIES] if isinstance(names, list) else []
    if model_impl == "argosy" or (model_impl == "auto" and own):
        if not own:
            raise ValueError(
                f"{file}: architectures is {names}; Argosy's own decoder serves {', '.join(FAMILIES)}, "
                "use --model-impl auto for other models"
            )
        return ModelSelection("argosy", f"{own[0]} is a family of Argosy's own decoder")
    if path.is_file():
        raise ValueError(
            f"{file}: transformers does not serve GGUF files; use --model-impl auto, "
            "or the safetensors checkpoint of the same model"
        )
    if not _has_transformers():
        raise ValueError(
            f"{file}: architectures is {names}; Argosy itself serves {', '.join(FAMILIES)}, "
            f"and other models with transformers: {install_command('transformers')}"
        )
    reason = (
        "--model-impl transformers"
        if model_impl == "transformers"
        else f"{', '.join(map(str, names)) if isinstance(names, list) else 'the model'} "
        "is no family of Argosy's own decoder"
    )
    return ModelSelection("transformers", reason)


def build_transformers_model(
    path: Path,
    dtype: torch.dtype,
    *,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    generation_config: str = AUTO_CONFIG,
) -> GenericModel:
    """Build the model in `path` with transformers, without its weights.

    Raises:
        ValueError: The model cannot be served. The message gives the reason.
    """
    from argosy.engine.execution.decoders.generic_builder import build_generic_model

    return build_generic_model(
        path,
        dtype,
        eos_token_ids=partial(_eos_token_ids, path, generation_config),
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
    )


def read_any_architecture(
    path: Path, model_impl: ModelImpl = "auto", *, trust_remote_code: bool = False
) -> AnyArchitecture:
    """Read the architecture of the checkpoint in `path`. Models of transformers need torch.

    Raises:
        ValueError: The model cannot be served. The message says what to do.
    """
    layout = read_pooling_layout(path)
    if layout is not None:
        return read_pooling_architecture(path, layout)
    if select_implementation(path, model_impl).implementation == "argosy":
        return read_architecture(path)
    import torch

    return build_transformers_model(
        path, torch.float32, trust_remote_code=trust_remote_code
    ).architecture


def find_stored_integers(path: Path, architecture: AnyArchitecture) -> StoredIntegers | None:
    """Return the integers of a quantized checkpoint that a CPU computes with. Only quantized checkpoints need torch.

    Raises:
        ValueError: The checkpoint is damaged, its quantization is not supported, or torch is not installed.
    """
    _, values = read_config_values(path)
    text = values.get("text_config")
    is_quantized = "quantization_config" in (values | text if isinstance(text, dict) else values)
    is_own_decoder = isinstance(architecture, ModelArchitecture)
    if not is_own_decoder or not (is_quantized or path.is_file()):
        return None
    try:
        from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: the size of quantized weights needs {error.name}; {install_command('engine')}"
        ) from error

    return CheckpointReader(path).find_stored_integers()


def _eos_token_ids(path: Path, generation_config: str, vocab_size: int) -> tuple[int, ...]:
    file, values = read_config_values(path)
    text = values.get("text_config")
    config = CheckpointConfig(file, values | text if isinstance(text, dict) else values, {})
    return read_eos_token_ids(path, config, vocab_size, generation_config)


def _has_transformers() -> bool:
    try:
        return importlib.util.find_spec("transformers") is not None
    except ValueError:  # hidden by `sys.modules["transformers"] = None`
        return False
