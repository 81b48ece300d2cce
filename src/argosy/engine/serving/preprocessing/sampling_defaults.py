"""Sampling parameters that a checkpoint's generation_config.json recommends, for requests that do not set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from argosy.engine.execution.config.checkpoint_config import (
    AUTO_CONFIG,
    CheckpointConfig,
    applies_sampling_defaults,
    read_generation_config,
)
from argosy.protocol import PARAMETER_RANGES, GenerationRequest

Body = TypeVar("Body", bound=GenerationRequest)

MAX_TOKENS_FIELD = "max_new_tokens"
"""Name of `max_tokens` in transformers."""
_INTEGER_FIELDS = frozenset({"top_k", MAX_TOKENS_FIELD})
_NEUTRAL_VALUES: dict[str, object] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""Settings of transformers that change its output and are not applied here, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of the sampling parameters of a model. Others are those of the API."""

    values: Mapping[str, float] = field(default_factory=dict)
    """Defaults by parameter. That of `max_tokens` holds as far as the context allows."""
    source: str = ""
    """File of the defaults, or an empty string if none apply."""
    unapplied: tuple[str, ...] = ()
    """Settings of the file that would change the output of transformers and are not applied, as in vLLM."""

    @property
    def max_tokens(self) -> int | None:
        """Default of `max_tokens`."""
        value = self.values.get("max_tokens")
        return None if value is None else int(value)

    def apply(self, body: Body) -> Body:
        """Return the body with the defaults of the parameters that it leaves open, except `max_tokens`."""
        missing = {
            name: value
            for name, value in self.values.items()
            if name != "max_tokens" and getattr(body, name) is None
        }
        return msgspec.structs.replace(body, **missing) if missing else body


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NO_SAMPLING_DEFAULTS = SamplingDefaults()
OVERRIDABLE_FIELDS = (*_SAMPLING_FIELDS, MAX_TOKENS_FIELD)
"""Names in generation_config.json and in `--override-generation-config`."""


def read_sampling_defaults(
    path: Path, source: str = AUTO_CONFIG, overrides: Mapping[str, float | None] | None = None
) -> SamplingDefaults:
    """Read the sampling defaults of a checkpoint.

    Args:
        path: Directory of the checkpoint.
        source: `auto` for the checkpoint's generation_config.json, `none`, or another folder with such a file.
        overrides: Values that replace those of the file. None removes a value.

    Raises:
        ValueError: A value is out of its range, or an override is unknown. The message names file and field.
    """
    config = read_generation_config(path, source)
    values = config.values if applies_sampling_defaults(source) else {}
    overrides = overrides or {}
    unknown = sorted(set(overrides) - set(OVERRIDABLE_FIELDS))
    if unknown:
        raise ValueError(
            f"--override-generation-config has {unknown[0]!r}; it may have {', '.join(OVERRIDABLE_FIELDS)}"
        )
    replacement = CheckpointConfig(Path("--override-generation-config"), overrides, {})
    defaults = {}
    for name in OVERRIDABLE_FIELDS:
        stated_by = replacement if name in overrides else config.with_values(values)
        value = _read_value(stated_by, name)
        if value is not None:
            defaults["max_tokens" if name == MAX_TOKENS_FIELD else name] = value
    unapplied = tuple(
        name
        for name, neutral in _NEUTRAL_VALUES.items()
        if values.get(name) is not None and values[name] != neutral
    )
    is_used = bool(defaults) and applies_sampling_defaults(source)
    return SamplingDefaults(defaults, str(config.path) if is_used else "", unapplied)


def _read_value(config: CheckpointConfig, name: str) -> float | None:
    allowed = PARAMETER_RANGES["max_tokens" if name == MAX_TOKENS_FIELD else name]
    value = (
        config.optional_integer(name, minimum=-1)
        if name in _INTEGER_FIELDS
        else config.optional_number(name, allowed.minimum, exclusive=allowed.exclusive_minimum)
    )
    if value is not None and (value not in allowed or (name == MAX_TOKENS_FIELD and value < 1)):
        raise config.error(name, f"a number {allowed}")
    return value
