"""Settings of an adapter in PEFT's format: which fields are honoured, which have no effect, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import re2

MAX_RANK = 512
MAX_PATTERNS = 10_000
"""Maximum entries of a list or mapping."""
ALL_LINEAR = "all-linear"
_NO_EFFECT = {
    *("lora_dropout", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
    *("peft_version", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "layers_pattern"),
}
"""Fields that matter for training only, or that other fields switch on. Layers are always those of the decoder."""
_CONVERTIBLE_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of initializations that change the base model's weights."""
_HARMLESS_INITS = {"gaussian", "orthogonal", "eva", "mica", "true", "false"}
_REFUSED = {
    "fan_in_fan_out": "it is for layers whose matrix is stored transposed, which no supported model has",
    "layer_replication": "it builds another base model",
    "use_qalora": "its sums over groups of inputs are not computed",
    "velora_config": "its arithmetic is not computed",
    "monteclora_config": "its arithmetic is not computed",
    "use_bdlora": "its block-diagonal matrices are not computed",
    "arrow_config": "routing between adapters is not computed",
    "kasa_config": "its singular values are not applied",
    "alora_invocation_tokens": "an adapter always applies to the whole prompt",
    "target_parameters": "adapters of experts and of other bare parameters are not computed",
}
"""Field -> why it is refused unless it is off."""


class AdapterError(ValueError):
    """An adapter cannot be used. The message names the field, tensor or module, and says what to do."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Honoured fields of adapter_config.json."""

    rank: int
    alpha: float
    is_targeted: Callable[[str], bool]
    """Whether the path of a module, such as `model.layers.0.self_attn.q_proj`, is one that the adapter changes."""
    targets_all_linear: bool
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: Mapping[str, Any] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Any] = field(default_factory=dict)
    saved_modules: tuple[str, ...] = ()
    """Names of modules that the adapter has as a whole."""
    token_ids: Mapping[str, list[int]] = field(default_factory=dict)
    """Name of a module -> tokens of which the adapter has the rows."""
    ensure_weight_tying: bool = False

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return int(_match_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of B A of a module."""
        rank, alpha = self.rank_of(module), _match_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_peft_config(values: Mapping[str, object]) -> PeftConfig:
    """Check every field of adapter_config.json.

    Raises:
        AdapterError: A field is not honoured or has the wrong type. The message names it.
    """
    if values.get("peft_type") != "LORA":
        raise AdapterError(
            f"peft_type is {_quote(values.get('peft_type'))}; only LORA is supported, with DoRA as use_dora"
        )
    for name, reason in _REFUSED.items():
        if values.get(name):
            raise AdapterError(f"{name} is set, but {reason}; train the adapter without it")
    if values.get("bias", "none") != "none":
        raise AdapterError(
            f"bias is {_quote(values['bias'])}, which changes the base model's biases; train it with bias none"
        )
    _check_init(values.get("init_lora_weights", True))
    fields = _Fields(values)
    config = PeftConfig(
        rank=fields.integer("r", 8, MAX_RANK),
        alpha=fields.number("lora_alpha", 8.0),
        is_targeted=_compile_targets(fields),
        targets_all_linear=values.get("target_modules") == ALL_LINEAR,
        use_rslora=fields.flag("use_rslora"),
        use_dora=fields.flag("use_dora"),
        lora_bias=fields.flag("lora_bias"),
        rank_pattern=fields.patterns("rank_pattern", MAX_RANK),
        alpha_pattern=fields.patterns("alpha_pattern", None),
        saved_modules=tuple(fields.names("modules_to_save") or ()),
        token_ids=fields.token_ids(),
        ensure_weight_tying=fields.flag("ensure_weight_tying"),
    )
    if config.use_dora and config.lora_bias:
        raise AdapterError("use_dora and lora_bias are both set, which PEFT does not define")
    fields.check_unread()
    return config


def _check_init(value: object) -> None:
    name = str(value).lower()
    if name.startswith(_CONVERTIBLE_INITS):
        raise AdapterError(
            f"init_lora_weights is {_quote(value)}, which changes the base model's weights; convert the adapter with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if name not in _HARMLESS_INITS:
        raise AdapterError(f"init_lora_weights is {_quote(value)}, which is not known")


class _Fields:
    """Typed access to the fields, which remembers those that were read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._read = {"peft_type", "bias", "init_lora_weights", "task_type", *_REFUSED, *_NO_EFFECT}
        task = values.get("task_type")
        if task not in (None, "CAUSAL_LM"):
            raise AdapterError(f"task_type is {_quote(task)}; only CAUSAL_LM is supported")

    def get(self, name: str) -> Any:  # noqa: ANN401 - checked by the callers
        """Return a value of any type, or None."""
        self._read.add(name)
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        """Return a boolean, false by default."""
        value = self.get(name)
        if value not in (None, False, True):
            raise AdapterError(f"{name} is {_quote(value)} instead of true or false")
        return bool(value)

    def integer(self, name: str, default: int, limit: int) -> int:
        """Return an integer from 1 to `limit`."""
        value = self.get(name)
        return default if value is None else _check_integer(name, value, limit)

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        value = self.get(name)
        return default if value is None else _check_number(name, value)

    def names(self, name: str) -> list[str] | None:
        """Return a list of names, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise AdapterError(f"{name} is not a list of names")
        if len(value) > MAX_PATTERNS:
            raise AdapterError(f"{name} has more than {MAX_PATTERNS} names")
        return value

    def patterns(self, name: str, max_rank: int | None) -> dict[str, Any]:
        """Return the numbers by pattern. They are integers from 1 to `max_rank`, if it is not None."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise AdapterError(f"{name} is not a mapping of at most {MAX_PATTERNS} patterns")
        for key, number in value.items():
            _compile(rf"(?:.*\.)?(?:{key})", name)
            if max_rank is None:
                _check_number(f"{name}[{_quote(key)}]", number)
            else:
                _check_integer(f"{name}[{_quote(key)}]", number, max_rank)
        return value

    def token_ids(self) -> dict[str, list[int]]:
        """Return `trainable_token_indices` by the name of a module."""
        value = self.get("trainable_token_indices")
        if value is None:
            return {}
        by_module = value if isinstance(value, dict) else {"embed_tokens": value}
        for module, ids in by_module.items():
            is_list = isinstance(ids, list) and ids and all(type(each) is int for each in ids)
            if not is_list or min(ids) < 0 or len(set(ids)) < len(ids):
                raise AdapterError(
                    f"trainable_token_indices of {_quote(module)} is not a list of different token ids"
                )
        return by_module

    def check_unread(self) -> None:
        """Refuse fields of other versions of PEFT that are switched on."""
        for name, value in self._values.items():
            if name not in self._read and value not in (None, False, "", [], {}):
                raise AdapterError(
                    f"the field {_quote(name)} is not known, so that its effect would be missing; remove it if it "
                    "has none"
                )


def _compile_targets(fields: _Fields) -> Callable[[str], bool]:
    """Return whether the path of a module is targeted, as PEFT decides it."""
    is_included = _compile_names(fields, "target_modules")
    is_excluded = _compile_names(fields, "exclude_modules")
    layers = fields.get("layers_to_transform")
    numbers = None
    if layers not in (None, []):
        numbers = set(layers) if isinstance(layers, list) else {layers}
        if not all(type(number) is int for number in numbers):
            raise AdapterError("layers_to_transform is not a list of numbers of layers")

    def is_targeted(path: str) -> bool:
        if not is_included(path) or is_excluded(path):
            return False
        match = re2.search(r"(?:^|\.)layers\.(\d+)\.", path)
        return numbers is None or (match is not None and int(match[1]) in numbers)

    return is_targeted


def _compile_names(fields: _Fields, name: str) -> Callable[[str], bool]:
    value = fields.get(name)
    if value == ALL_LINEAR:
        return lambda path: not path.endswith("lm_head") and not path.endswith("embed_tokens")
    if isinstance(value, str):
        pattern = _compile(value, name)
        return lambda path: pattern.fullmatch(path) is not None
    names = set(fields.names(name) or ())
    return lambda path: any(path == each or path.endswith(f".{each}") for each in names)


def _match_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if _compile(rf"(?:.*\.)?(?:{pattern})", pattern).fullmatch(module):
            return float(value)
    return default


def _compile(pattern: str, name: str) -> Any:  # noqa: ANN401 - the library is untyped
    """Compile a regular expression so that every match takes linear time."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise AdapterError(
            f"{name} has the pattern {_quote(pattern)}, which cannot be compiled ({error}); use one without "
            "lookaround and backreferences"
        ) from error


def _check_integer(name: str, value: object, limit: int) -> int:
    if type(value) is not int or not 1 <= value <= limit:
        raise AdapterError(f"{name} is {_quote(value)} instead of a number from 1 to {limit}")
    return value


def _check_number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise AdapterError(f"{name} is {_quote(value)} instead of a finite number")
    return float(value)  # type: ignore[arg-type]


def _quote(value: object) -> str:
    return repr(value)[:80]
