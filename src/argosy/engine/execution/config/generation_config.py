"""The generation_config.json of a checkpoint, or of another folder that `--generation-config` names."""

from __future__ import annotations

from pathlib import Path

from argosy.engine.execution.config.checkpoint_config import CheckpointConfig, read_json

GENERATION_CONFIG_FILE = "generation_config.json"
AUTO_CONFIG = "auto"
NO_CONFIG = "none"
_NO_CONFIG_NAMES = frozenset({NO_CONFIG, "vllm"})
"""Names for the neutral defaults. The second one is vLLM's."""


def read_generation_config(path: Path, source: str = AUTO_CONFIG) -> CheckpointConfig:
    """Read the generation config that `source` selects, which is empty if the checkpoint has none.

    Args:
        path: Directory of the checkpoint.
        source: `auto` or `none` for the checkpoint's own file, or another folder with such a file.

    Raises:
        ValueError: The file is no JSON object, or the folder has none.
    """
    if source == AUTO_CONFIG or source in _NO_CONFIG_NAMES:
        file = path / GENERATION_CONFIG_FILE
        return CheckpointConfig(file, read_json(file) if file.is_file() else {}, {})
    file = Path(source).expanduser() / GENERATION_CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"--generation-config is {source!r}, but there is no {file}; use auto, none, or a folder with this file"
        )
    return CheckpointConfig(file, read_json(file), {})


def applies_sampling_defaults(source: str) -> bool:
    """Return whether requests get the defaults of the generation config. Its end-of-sequence ids always apply."""
    return source not in _NO_CONFIG_NAMES
