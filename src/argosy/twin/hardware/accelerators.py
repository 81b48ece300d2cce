"""Accelerators, engines and the efficiencies of their kernels, from the data files of this package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from argosy.settings import load_yaml
from argosy.twin.hardware.errors import CapacityError

MAX_QUANTITY = 1e9
Precision = Literal["bf16", "fp8", "int8", "fp4", "int4"]
WEIGHT_BYTES: Mapping[str, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "int4": 0.53125,
}
"""Bytes of a weight with its scales."""
KV_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0625}
"""Bytes of a number in the KV cache with its scales."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of accelerator, by its specification. Peak rates are dense."""

    title: str
    memory_gib: float
    bandwidth_gb_s: float
    tflops: dict[Precision, float]
    """Peak rate of matrix products by the type of their inputs."""
    link_gb_s: float
    """Bandwidth of the links to its peers, one way."""
    link_group: int
    """Accelerators that these links connect. A larger group is slower by `NETWORK_GB_S`."""
    watts: float
    dollars_per_hour: dict[Literal["on_demand", "spot"], float]
    sources: dict[str, str]
    """Source of each value, as the head of the data file lists them."""
    aliases: tuple[str, ...] = ()
    like: str = ""
    """Accelerator whose measured efficiencies are used."""
    host: bool = False
    """Whether it is the processor of the host, so that a pool needs no accelerator for it."""
    max_compute: float = 1.0
    """Largest share of the peak rate that a matrix product was seen to reach."""


class KernelEfficiencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of an accelerator's peaks that the kernels of an engine reach."""

    gemm: dict[Precision, tuple[float, float, float, float]]
    """Compute share, memory share, launch time in us, and sharpness of the transition between both bounds."""
    decode_attention: dict[str, tuple[float, float]]
    """Memory share and launch time in us, by the type of the KV cache."""
    prefill_attention: float
    """Compute share."""
    all_reduce: dict[int, tuple[float, float]]
    """Latency in us and share of the link, by the number of accelerators."""


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host times of an engine beside its kernels, and how it forms steps."""

    step_ms: float
    """Host time of a step."""
    sequence_us: float
    """Host time of a sequence in a step."""
    request_ms: float
    """Time of a request outside the steps, before its first token."""
    launch_share: float
    """Share of the launch times of products in fp8 that remains in CUDA graphs, where quantization is fused."""
    prefill: Literal["chunked", "whole", "alone"]
    """How prompts enter steps: in chunks, whole beside decoding, or in steps without decoding."""
    max_batch_tokens: int
    """Most tokens of a step."""
    memory_share: float
    """Share of the memory that the engine uses."""
    memory_share_of: Literal["all", "free"] = "all"
    """Whether the share is of all memory, or of the memory that weights and activations leave."""
    layer_us: float = 0.0
    """Host time of a layer in a step."""
    sharpness: float | None = None
    """Sharpness of quantized matrix products, in place of the kernels'."""
    compute_share: float = 1.0
    """Share of the compute efficiency of quantized products that remains with this sharpness."""
    kernels: str = ""
    """EngineProfile whose kernels were measured. By default its own."""
    fleet_engine: str = ""
    """EngineProfile kind of a fleet file. Empty if a fleet has none."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerators by name, and engines with the efficiencies of their kernels."""

    accelerators: dict[str, Accelerator]
    engines: dict[str, EngineProfile]
    kernels: dict[str, dict[str, KernelEfficiencies]]
    """Efficiencies by engine and accelerator."""

    def find_accelerator(self, name: str) -> tuple[str, Accelerator]:
        """Return the name and specification of an accelerator. Raises CapacityError if it is unknown."""
        key = name.strip().lower().replace("-", "_")
        for known, accelerator in self.accelerators.items():
            if key == known or key in accelerator.aliases:
                return known, accelerator
        raise CapacityError(
            f"there is no accelerator {name!r}; use one of {', '.join(self.accelerators)}, or declare it in a file"
            " for --hardware"
        )

    def find_engine(self, name: str) -> EngineProfile:
        """Return an engine. Raises CapacityError if it is unknown."""
        engine = self.engines.get(name)
        if engine is None:
            raise CapacityError(
                f"there is no engine {name!r}; use one of {', '.join(self.engines)}"
            )
        return engine

    def find_kernels(self, engine: str, accelerator: str) -> KernelEfficiencies:
        """Return the efficiencies of an engine's kernels on an accelerator, or on the one that it is like."""
        measured = self.kernels[self.find_engine(engine).kernels or engine]
        while accelerator not in measured:
            accelerator = self.accelerators[accelerator].like
        return measured[accelerator]


def load_hardware(overrides: Path | None = None) -> Hardware:
    """Return the hardware of the data files.

    Args:
        overrides: YAML file with accelerators in the format of `accelerators.yaml`. An accelerator that is known
            keeps the values that the file does not give.

    Raises:
        CapacityError: The file cannot be read, or a value is wrong.
    """
    described = dict(_read_data("accelerators.yaml"))
    if overrides is not None:
        for name, values in _read_overrides(overrides).items():
            described[name] = _merge(described.get(name, {"sources": {}}), values)
    try:
        accelerators = msgspec.convert(described, dict[str, Accelerator])
    except msgspec.ValidationError as error:
        raise CapacityError(f"{overrides}: {error}") from error
    kernels = msgspec.convert(
        _read_data("efficiencies.yaml"),
        dict[str, dict[str, KernelEfficiencies]],
        str_keys=True,
    )
    for name, accelerator in accelerators.items():
        _check(name, accelerator, accelerators, kernels["vllm"])
    return Hardware(
        accelerators=accelerators,
        engines=msgspec.convert(_read_data("engines.yaml"), dict[str, EngineProfile]),
        kernels=kernels,
    )


def _check(
    name: str,
    accelerator: Accelerator,
    others: Mapping[str, Accelerator],
    measured: Mapping[str, KernelEfficiencies],
) -> None:
    quantities = {
        "memory_gib": accelerator.memory_gib,
        "bandwidth_gb_s": accelerator.bandwidth_gb_s,
        "link_gb_s": accelerator.link_gb_s,
        "link_group": accelerator.link_group,
        **{f"tflops.{key}": value for key, value in accelerator.tflops.items()},
    }
    for key, value in quantities.items():
        if not 0 < value < MAX_QUANTITY:
            raise CapacityError(f"{name}.{key} is {value:g}; give a number above 0")
    prices = [("watts", accelerator.watts), *accelerator.dollars_per_hour.items()]
    for key, price in prices:
        if not 0 <= price < MAX_QUANTITY:
            raise CapacityError(
                f"{name}: {key} is {price:g}; nothing has a negative price, so give 0 or more"
            )
    if "bf16" not in accelerator.tflops or "on_demand" not in accelerator.dollars_per_hour:
        raise CapacityError(f"{name}: give tflops.bf16 and dollars_per_hour.on_demand")
    if (
        name not in measured
        and accelerator.like not in measured
        and not (accelerator.like in others and others[accelerator.like].like in measured)
    ):
        raise CapacityError(
            f"{name}.like is {accelerator.like!r}; give one of {', '.join(measured)}"
        )


def _merge(known: Mapping[str, Any], values: Any) -> dict[str, Any]:  # noqa: ANN401 - from a file
    if not isinstance(values, dict):
        raise CapacityError("a file for --hardware maps names of accelerators to their values")
    merged = dict(known)
    for key, value in values.items():
        old = merged.get(key)
        merged[key] = (
            {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _read_overrides(path: Path) -> Mapping[str, Any]:
    try:
        value = load_yaml(path.read_bytes())
    except OSError as error:
        raise CapacityError(f"cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise CapacityError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CapacityError(f"{path} must map names of accelerators to their values")
    return value


@cache
def _read_data(name: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = load_yaml(
        resources.files("argosy.twin.hardware").joinpath(name).read_bytes()
    )
    return value
