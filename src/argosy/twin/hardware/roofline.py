"""Duration of the steps of a replica, by a roofline with the measured efficiencies of kernels.

Every matrix product takes the smooth maximum of its time by compute and its time by memory. Attention reads the KV
cache, or computes. Collectives take a latency and the time of their bytes. The engine adds host time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.twin.hardware.accelerators import (
    KV_BYTES,
    WEIGHT_BYTES,
    Accelerator,
    EngineProfile,
    Hardware,
    KernelEfficiencies,
    Precision,
)
from argosy.twin.hardware.errors import CapacityError
from argosy.twin.hardware.model_shape import ModelShape, attention_precision

NETWORK_GB_S = 50.0
"""Bandwidth between groups of accelerators, for each of them and one way: a network card of 400 Gbit/s."""
NETWORK_LATENCY_S = 10e-6
ELEMENTWISE_TRANSFERS = 10
"""Reads and writes of the hidden state of a layer beside matrix products, such as norms and residuals."""
ELEMENTWISE_MEMORY = 0.8
ELEMENTWISE_LAUNCH_S = 8e-6
"""Launches of these kernels for each layer: four of 2 us."""
EXPERTS_NATIVE = (0.5, 0.9)
"""Shares of the compute and memory efficiency that remain for experts, which have few and unequal rows."""
EXPERTS_DEQUANTIZED = (0.3, 0.75)
"""The same for experts whose weights are converted to bf16 in the kernel."""
MAX_PARALLEL = 1024
_PEAK_TYPES: dict[Precision, tuple[Precision, ...]] = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "bf16"),
    "int8": ("int8", "bf16"),
    "fp4": ("fp4", "bf16"),
    "int4": ("bf16",),
}
"""Types in which weights of a type are multiplied: the first that the accelerator has."""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: a model, its precisions, and the accelerators that it runs on."""

    model: ModelShape
    accelerator_name: str
    accelerator: Accelerator
    engine_name: str
    engine: EngineProfile
    kernels: KernelEfficiencies
    weights: Precision = "bf16"
    kv: str = "bf16"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def accelerators(self) -> int:
        """Number of accelerators of the replica."""
        return self.tensor_parallel * self.pipeline_parallel


def build_replica(
    hardware: Hardware,
    model: ModelShape,
    accelerator: str,
    *,
    engine: str = "vllm",
    weights: Precision = "bf16",
    kv: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
) -> ReplicaSpec:
    """Return a replica. By default its KV cache is in fp8 if the accelerator and the weights are, and else in bf16.

    Raises:
        CapacityError: A name is unknown, or the model cannot be divided so.
    """
    name, found = hardware.find_accelerator(accelerator)
    if weights not in WEIGHT_BYTES:
        raise CapacityError(
            f"weights {weights!r} are unknown; use one of {', '.join(WEIGHT_BYTES)}"
        )
    if kv is None:
        kv = "fp8" if weights in {"fp8", "fp4"} and "fp8" in found.tflops else "bf16"
    if kv not in KV_BYTES:
        raise CapacityError(f"a KV cache in {kv!r} is unknown; use one of {', '.join(KV_BYTES)}")
    for label, number in (
        ("tensor parallelism", tensor_parallel),
        ("pipeline parallelism", pipeline_parallel),
        ("expert parallelism", expert_parallel),
    ):
        if not 1 <= number <= MAX_PARALLEL:
            raise CapacityError(f"{label} is {number}; give a number from 1 to {MAX_PARALLEL}")
    if model.heads % tensor_parallel:
        raise CapacityError(
            f"{model.name} has {model.heads} attention heads, which {tensor_parallel} accelerators cannot"
            " divide evenly; give a divisor as tensor parallelism"
        )
    if pipeline_parallel > model.layers:
        raise CapacityError(
            f"{model.name} has {model.layers} layers; give at most so many pipeline stages"
        )
    return ReplicaSpec(
        model=model,
        accelerator_name=name,
        accelerator=found,
        engine_name=engine,
        engine=hardware.find_engine(engine),
        kernels=hardware.find_kernels(engine, name),
        weights=weights,
        kv=kv,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=min(expert_parallel, tensor_parallel),
    )


class _Product(msgspec.Struct, frozen=True):
    """A matrix product of every token with a matrix of n x k."""

    n: float
    k: float
    weights: Precision


class RooflineCost:
    """Price of the steps of a replica, as `StepCost` declares it. Costs of row counts are computed once."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._bandwidth = spec.accelerator.bandwidth_gb_s * 1e9
        self._products = _layer_products(spec)
        self._dense_products = _dense_products(spec)
        self._rows_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        engine = spec.engine
        self._step_s = engine.step_ms / 1e3 + engine.layer_us / 1e6 * spec.model.layers
        self._sequence_s = engine.sequence_us / 1e6
        self._context_s, self._attention_launch_s = _decode_attention(spec)
        self._window_share = spec.model.window_layers / spec.model.layers
        self._prefill_rate = _prefill_attention_rate(spec)

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        """Return the duration of a step in seconds, as `StepCost` declares it."""
        spec = self._spec
        layers = spec.model.layers
        rows = decode_rows + sum(tokens for tokens, _ in prefill_chunks)
        sampled = decode_rows + len(prefill_chunks)
        attention = 0.0
        if decode_rows:
            read = context_tokens
            if self._window_share:
                kept = min(context_tokens, decode_rows * spec.model.window)
                read = context_tokens * (1 - self._window_share) + kept * self._window_share
            attention += layers * (read * self._context_s + self._attention_launch_s)
        if prefill_chunks:
            pairs = sum(self._attended(tokens, before) for tokens, before in prefill_chunks)
            attention += layers * (pairs / self._prefill_rate + self._attention_launch_s)
        device = self._rows_seconds(rows) + attention
        if spec.pipeline_parallel > 1:
            transfer = rows * spec.model.hidden * 2 / (NETWORK_GB_S * 1e9) + NETWORK_LATENCY_S
            device += (spec.pipeline_parallel - 1) * transfer
        return device + self._head_seconds(sampled) + self._step_s + self._sequence_s * sampled

    def _attended(self, tokens: int, before: int) -> float:
        """Return the pairs of query and key of a chunk, for an average layer."""
        pairs = tokens * (before + tokens / 2)
        if not self._window_share:
            return pairs
        seen = tokens * min(before + tokens / 2, float(self._spec.model.window))
        return pairs * (1 - self._window_share) + seen * self._window_share

    def _rows_seconds(self, rows: int) -> float:
        """Return the time of all layers for `rows` tokens, without their attention."""
        known = self._rows_s.get(rows)
        if known is None:
            known = self._rows_s[rows] = self._compute_rows_seconds(rows)
        return known

    def _compute_rows_seconds(self, rows: int) -> float:
        spec = self._spec
        model = spec.model
        layer = sum(
            gemm_seconds(spec, rows, each.n, each.k, each.weights) for each in self._products
        )
        layer += ELEMENTWISE_LAUNCH_S + (
            ELEMENTWISE_TRANSFERS * rows * model.hidden * 2 / (self._bandwidth * ELEMENTWISE_MEMORY)
        )
        layer += _all_reduce_seconds(spec, rows)
        dense = sum(
            gemm_seconds(spec, rows, each.n, each.k, each.weights) for each in self._dense_products
        )
        total = layer * model.layers + dense * (model.layers - model.moe_layers)
        if model.is_moe:
            total += model.moe_layers * _experts_seconds(spec, rows)
        return total

    def _head_seconds(self, sampled: int) -> float:
        known = self._head_s.get(sampled)
        if known is None:
            spec = self._spec
            width = spec.model.vocab / spec.tensor_parallel
            known = gemm_seconds(spec, sampled, width, spec.model.hidden, "bf16")
            self._head_s[sampled] = known
        return known


def gemm_seconds(
    spec: ReplicaSpec,
    rows: float,
    n: float,
    k: float,
    weights: Precision,
    *,
    weight_share: float = 1.0,
    efficiency: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Return the time of a product of `rows` tokens with a matrix of n x k.

    Args:
        spec: The replica.
        rows: Tokens.
        n: Outputs of a token.
        k: Inputs of a token.
        weights: Type of the weights.
        weight_share: Number of such matrices that are read.
        efficiency: Factors of the compute and memory shares.
    """
    accelerator, kernels = spec.accelerator, spec.kernels
    peak = next(each for each in _PEAK_TYPES[weights] if each in accelerator.tflops)
    measured = peak if peak in kernels.gemm else ("fp8" if "fp8" in kernels.gemm else "bf16")
    if peak == "bf16":
        measured = "bf16"
    compute, memory, launch_us, sharpness = kernels.gemm[measured]
    compute = min(compute, accelerator.max_compute)
    if measured != "bf16":
        sharpness = spec.engine.sharpness or sharpness
        compute *= spec.engine.compute_share
    if measured == "fp8":
        launch_us *= spec.engine.launch_share
    computing = 2 * rows * n * k / (accelerator.tflops[peak] * 1e12 * compute * efficiency[0])
    inputs = WEIGHT_BYTES.get(peak, 2.0)
    moved = n * k * weight_share * WEIGHT_BYTES[weights] + rows * (k * inputs + n * 2)
    moving = moved / (accelerator.bandwidth_gb_s * 1e9 * memory * efficiency[1])
    if computing == 0.0:
        return moving + launch_us / 1e6
    larger, smaller = max(computing, moving), min(computing, moving)
    smooth = larger * (1 + (smaller / larger) ** sharpness) ** (1 / sharpness)
    return float(smooth + launch_us / 1e6)


def _layer_products(spec: ReplicaSpec) -> list[_Product]:
    """Return the products of a layer's attention and, with experts, its router."""
    model, t = spec.model, spec.tensor_parallel
    weights = attention_precision(model, spec.weights)
    heads = model.heads / t
    if model.kv_lora_rank:
        query = heads * (model.nope_dim + model.rope_dim)
        products = [
            _Product(
                model.kv_lora_rank + model.rope_dim + model.q_lora_rank, model.hidden, weights
            ),
            _Product(query, model.q_lora_rank or model.hidden, weights),
            _Product(heads * (model.nope_dim + model.value_dim), model.kv_lora_rank, weights),
            _Product(model.hidden, heads * model.value_dim, weights),
        ]
    else:
        kv_heads = max(model.kv_heads / t, 1.0)
        products = [
            _Product((heads + 2 * kv_heads) * model.head_dim, model.hidden, weights),
            _Product(model.hidden, heads * model.head_dim, weights),
        ]
    return products


def _dense_products(spec: ReplicaSpec) -> list[_Product]:
    """Return the products of a dense feed-forward layer."""
    model, width = spec.model, spec.model.ffn / spec.tensor_parallel
    weights = attention_precision(model, spec.weights)
    return [
        _Product((model.mlp_matrices - 1) * width, model.hidden, weights),
        _Product(model.hidden, width, weights),
    ]


def _experts_seconds(spec: ReplicaSpec, rows: int) -> float:
    """Return the time of the experts, the shared expert and the router of a layer."""
    model, t, e = spec.model, spec.tensor_parallel, spec.expert_parallel
    weights = attention_precision(model, spec.weights)
    total = gemm_seconds(spec, rows, model.experts, model.hidden, "bf16")
    if model.shared_ffn:
        width = model.shared_ffn / t
        total += gemm_seconds(spec, rows, (model.mlp_matrices - 1) * width, model.hidden, weights)
        total += gemm_seconds(spec, rows, model.hidden, width, weights)
    untouched = (1 - model.experts_per_token / model.experts) ** rows
    touched = model.experts * (1 - untouched) / e
    routed = rows * model.experts_per_token / e
    width = model.expert_ffn * e / t
    is_native = spec.weights in spec.accelerator.tflops
    efficiency = EXPERTS_NATIVE if is_native else EXPERTS_DEQUANTIZED
    for n, k in (((model.mlp_matrices - 1) * width, model.hidden), (model.hidden, width)):
        total += gemm_seconds(
            spec,
            routed,
            n,
            k,
            spec.weights,
            weight_share=max(touched, 1.0),
            efficiency=efficiency,
        )
    return total


def _all_reduce_seconds(spec: ReplicaSpec, rows: int) -> float:
    """Return the time of the two all-reduces of a layer."""
    t = spec.tensor_parallel
    if t == 1:
        return 0.0
    measured = spec.kernels.all_reduce
    latency_us, share = measured[min(measured, key=lambda n: (n < min(t, max(measured)), n))]
    link = spec.accelerator.link_gb_s * 1e9 * share
    latency = latency_us / 1e6
    if t > spec.accelerator.link_group > 1:
        link, latency = NETWORK_GB_S * 1e9 * share, latency + NETWORK_LATENCY_S
    return 2 * (latency + 2 * (t - 1) / t * rows * spec.model.hidden * 2 / link)


def _decode_attention(spec: ReplicaSpec) -> tuple[float, float]:
    """Return the seconds for each token of context in a layer, and the launch time of a layer."""
    model, accelerator = spec.model, spec.accelerator
    measured = spec.kernels.decode_attention
    memory, launch_us = measured.get(spec.kv) or measured["bf16"]
    bandwidth = accelerator.bandwidth_gb_s * 1e9 * memory
    if model.kv_lora_rank:
        heads = model.heads / spec.tensor_parallel
        reading = (model.kv_lora_rank + model.rope_dim) * KV_BYTES[spec.kv] / bandwidth
        computing = 2 * heads * (2 * model.kv_lora_rank + model.rope_dim)
        computing /= accelerator.tflops["bf16"] * 1e12 * spec.kernels.prefill_attention
        return max(reading, computing), launch_us / 1e6
    kv_heads = max(model.kv_heads / spec.tensor_parallel, 1.0)
    return 2 * kv_heads * model.head_dim * KV_BYTES[spec.kv] / bandwidth, launch_us / 1e6


def _prefill_attention_rate(spec: ReplicaSpec) -> float:
    """Return the pairs of query and key for each second, of one layer."""
    model = spec.model
    heads = model.heads / spec.tensor_parallel
    wide = (
        model.nope_dim + model.rope_dim + model.value_dim
        if model.kv_lora_rank
        else 2 * model.head_dim
    )
    share = min(spec.kernels.prefill_attention, spec.accelerator.max_compute)
    return spec.accelerator.tflops["bf16"] * 1e12 * share / (2 * heads * wide)
