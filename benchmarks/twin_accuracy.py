"""Compare the hardware model with public measurements.

    python -m benchmarks.twin_accuracy                    write docs/reference/twin-accuracy.md
    python -m benchmarks.twin_accuracy --rows FILE.csv    print the same tables for other measurements

Each row is replayed as its protocol says: closed loops with that concurrency and those lengths, batches, or arrivals.
No coefficient is fitted to a row or a family; `efficiencies.yaml` and `engines.yaml` say what they were fitted to.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from argosy.twin.hardware import (
    CapacityError,
    Hardware,
    OfferedRequest,
    Precision,
    ReplicaSpec,
    RequestTimes,
    RooflineCost,
    ServingLimits,
    build_replica,
    fit_memory,
    load_hardware,
    load_shape,
    simulate_replica,
)
from benchmarks.twin_live import format_table

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "data" / "calibration.csv"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reference" / "twin-accuracy.md"
WEIGHTS: dict[str, Precision] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp4": "fp4",
    "mxfp4": "fp4",
    "int4": "int4",
    "uint4": "int4",
    "int8": "int8",
}
MLPERF_PROMPTS = {
    "llama2-70b-99": 294,
    "llama3.1-405b": 9400,
    "mixtral-8x7b": 425,
    "llama3.1-8b": 800,
    "deepseek-r1": 800,
}
"""Mean tokens of the prompts of MLPerf's data sets, which the rows do not have."""
MLPERF_LIMITS_MS = {
    ("llama2-70b-99", "poisson_server"): (2000, 200),
    ("llama2-70b-99", "poisson_interactive"): (450, 40),
    ("llama3.1-405b", "poisson_server"): (6000, 175),
    ("llama3.1-405b", "poisson_interactive"): (4500, 80),
    ("llama3.1-8b", "poisson_server"): (2000, 100),
    ("llama3.1-8b", "poisson_interactive"): (500, 30),
    ("deepseek-r1", "poisson_server"): (2000, 80),
    ("mixtral-8x7b", "poisson_server"): (2000, 200),
}
"""Limits of TTFT and TPOT at the 99th percentile."""
WAITS_FOR_MEMORY = 3.0
"""A TTFT this many times that of a replica with unlimited KV cache means that requests wait for memory."""
MAX_REQUESTS = 3000
MIN_KV_TOKENS = 32_768
"""KV cache of the smallest replica that is assumed for a row without parallelism."""
STREAM_INTERVAL = 10
"""Tokens that SGLang collects before it sends the first, as the scripts of InferenceX set it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement. Numbers that it does not have are None."""

    values: dict[str, str]

    def __getitem__(self, key: str) -> str:
        return (self.values.get(key) or "").strip()

    def number(self, key: str) -> float | None:
        """Return a number of the row."""
        try:
            return float(self[key])
        except ValueError:
            return None

    def integer(self, key: str, default: int = 1) -> int:
        """Return a whole number of the row."""
        value = self.number(key)
        return default if value is None else int(value)

    @property
    def engine(self) -> str:
        """The engine of the hardware model that is nearest to the row's."""
        name = self["engine"].lower()
        if name.startswith(("trt", "tensorrt", "nim")):
            return "trtllm"
        return "sglang" if name.startswith("sglang") else "vllm"

    @property
    def is_inferencex(self) -> bool:
        """Whether the row follows the protocol of InferenceX."""
        return "InferenceX" in self["notes"]

    @property
    def family(self) -> str:
        """Model, precision, engine and accelerator."""
        return f"{self['model']} {self['weights']}, {self.engine}, {self['gpu']}"


@dataclass(slots=True)
class Prediction:
    """Prediction of the model for a row, in the units of its columns."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_s: float | None = None
    requests_s: float | None = None
    """Highest rate within the limits of MLPerf."""
    unlimited_ttft_ms: float | None = None
    """TTFT of the same replica with unlimited KV cache."""
    reason: str = ""
    """Why nothing is predicted."""


@dataclass(slots=True)
class Comparison:
    """A row with its prediction."""

    row: Row
    prediction: Prediction
    errors: dict[str, float] = field(default_factory=dict)
    """Signed relative errors by measure: `ttft`, `tpot`, `throughput`, `rate`."""


def read_rows(path: Path) -> list[Row]:
    """Read the measurements of a CSV file."""
    with path.open(newline="") as file:
        return [Row(values) for values in csv.DictReader(file)]


def parallelism(row: Row) -> tuple[int, int, int]:
    """Return the tensor parallelism, expert parallelism and replicas of a row.

    Rows whose `tp` is the square of `ep` repeat others that have `ep` as `tp`. There, and where `tp` is below `ep`,
    `ep` is the number of accelerators.
    """
    expert = row.integer("ep")
    tensor = row.integer("tp", 0)
    if expert > 1 and (tensor == expert * expert or tensor < expert):
        tensor = expert
    return tensor, expert, row.integer("dp_or_replicas")


def build(hardware: Hardware, row: Row, kernels_of: str | None = None) -> ReplicaSpec:
    """Return the replica of a row. Raises CapacityError if the model, accelerator or precision is unknown."""
    weights = WEIGHTS.get(row["weights"].lower())
    if weights is None:
        raise CapacityError(f"weights {row['weights']!r} are unknown")
    model = load_shape(row["model"])
    tensor, expert, _ = parallelism(row)
    kv = row["kv_dtype"] or None
    if row.is_inferencex and row.engine == "vllm" and row["gpu"] != "b200_sxm" and model.is_moe:
        kv = "bf16"  # the scripts set fp8 for the others
    if row.engine == "sglang":
        kv = "bf16"
    gpu = row["gpu"].replace("_dual48", "")
    for tensor_parallel in [tensor] if tensor else [1, 2, 4, 8, 16]:
        spec = build_replica(
            hardware,
            model,
            gpu,
            engine=row.engine,
            weights=weights,
            kv=kv,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=row.integer("pp"),
            expert_parallel=expert,
        )
        if fit_memory(spec).kv_tokens > MIN_KV_TOKENS:
            break
    if kernels_of:
        kernels = hardware.find_kernels(row.engine, kernels_of)
        spec = msgspec.structs.replace(spec, kernels=kernels)
    return spec


def limits_of(row: Row, spec: ReplicaSpec, concurrency: int) -> ServingLimits:
    """Return the limits of an engine as the protocol of the row sets them."""
    prompt, output = row.integer("isl"), row.integer("osl")
    tokens: int | None = None
    wait_steps = 0
    if row.is_inferencex:
        if row.engine == "trtllm" and not spec.model.is_moe:
            tokens = prompt + output + (20 if prompt == output else 200)
            wait_steps = 20 if prompt == output and spec.tensor_parallel < 8 else 0
        elif row.engine == "trtllm":
            tokens = 20_000 if spec.model.name.startswith("gpt-oss") else concurrency + prompt + 64
        elif row.engine == "sglang":
            tokens = 32_768
    return ServingLimits(
        kv_tokens=fit_memory(spec, context_tokens=prompt + output).kv_tokens,
        engine=spec.engine,
        max_sequences=concurrency,
        max_batch_tokens=tokens,
        wait_steps=wait_steps,
    )


def draw_requests(row: Row, count: int) -> list[OfferedRequest]:
    """Return requests with the row's lengths; those of InferenceX are uniform between 0.8 of them and them."""
    generator = random.Random(row["id"])
    prompt, output = row.integer("isl"), row.integer("osl")
    if not row.is_inferencex:
        return [OfferedRequest(0.0, prompt, output)] * count
    return [
        OfferedRequest(
            0.0,
            generator.randint(int(prompt * 0.8), prompt),
            generator.randint(int(output * 0.8), output),
        )
        for _ in range(count)
    ]


def predict_closed_loop(row: Row, spec: ReplicaSpec) -> Prediction:
    """Simulate a closed loop: ten requests for each client."""
    concurrency = row.integer("concurrency_or_batch")
    cost = RooflineCost(spec)
    limits = limits_of(row, spec, concurrency)
    requests = draw_requests(row, min(10 * concurrency, max(MAX_REQUESTS, 2 * concurrency)))
    done = simulate_replica(cost, limits, requests, concurrency=concurrency)
    unlimited = msgspec.structs.replace(limits, kv_tokens=1 << 40)
    free = simulate_replica(cost, unlimited, requests, concurrency=concurrency)
    tpot_ms = 1e3 * statistics.fmean(each.tpot_s for each in done)
    buffered = STREAM_INTERVAL - 1 if row.is_inferencex and row.engine == "sglang" else 0
    return Prediction(
        ttft_ms=1e3 * statistics.fmean(each.ttft_s for each in done) + buffered * tpot_ms,
        tpot_ms=tpot_ms,
        tokens_s=sum(each.output_tokens for each in done) / max(each.last_token_s for each in done),
        unlimited_ttft_ms=1e3 * statistics.fmean(each.ttft_s for each in free),
    )


def predict_offline(row: Row, spec: ReplicaSpec) -> Prediction:
    """Simulate requests that all arrive at once."""
    prompt = row.integer("isl", MLPERF_PROMPTS.get(row["model"], 0))
    if not prompt:
        raise CapacityError("the row has no length of prompts")
    output = row.integer("osl")
    limits = limits_of(row, spec, 2048)
    count = min(MAX_REQUESTS, max(4 * limits.kv_tokens // (prompt + output), 64))
    requests = [OfferedRequest(0.0, prompt, output)] * count
    done = simulate_replica(RooflineCost(spec), limits, requests)
    tokens = count * output / max(each.last_token_s for each in done)
    replicas = max(row.integer("n_gpu", spec.accelerators) // spec.accelerators, 1)
    return Prediction(tokens_s=tokens * replicas)


def predict_server(row: Row, spec: ReplicaSpec) -> Prediction:
    """Search the highest rate whose 99th percentiles are within the limits of MLPerf."""
    prompt = row.integer("isl", MLPERF_PROMPTS.get(row["model"], 0))
    scenario = MLPERF_LIMITS_MS.get((row["model"], row["kind"]))
    if not prompt or not scenario:
        raise CapacityError("the row has no length of prompts, or its limits are not known")
    replicas = max(row.integer("n_gpu", spec.accelerators) // spec.accelerators, 1)
    cost, limits = RooflineCost(spec), limits_of(row, spec, 1024)
    generator = random.Random(row["id"])
    output, draws = row.integer("osl"), []
    for _ in range(2000):
        factor = generator.uniform(0.5, 1.5)
        lengths = max(2, int(prompt * factor)), max(2, int(output * factor))
        draws.append((generator.expovariate(1.0), *lengths))
    low = 0.0
    step = cost.step_seconds(512, 512 * (prompt + output / 2))
    high = 1024 / (output * step)
    for _ in range(7):
        rate, now, requests = (low + high) / 2, 0.0, []
        for gap, prompt_tokens, output_tokens in draws:
            now += gap / rate
            requests.append(OfferedRequest(now, prompt_tokens, output_tokens))
        done = simulate_replica(cost, limits, requests)
        at = int(0.99 * len(done))
        ttft = 1e3 * sorted(each.ttft_s for each in done)[at]
        tpot = 1e3 * sorted(each.tpot_s for each in done)[at]
        if ttft <= scenario[0] and tpot <= scenario[1] and not _piles_up(done):
            low = rate
        else:
            high = rate
    return Prediction(requests_s=low * replicas)


def _piles_up(done: Sequence[RequestTimes]) -> bool:
    """Return whether more requests are in flight at the end than in the middle."""
    sent = sorted(each.sent_s for each in done)
    in_flight = [
        sum(each.sent_s <= at < each.last_token_s for each in done)
        for at in (sent[len(sent) // 2], sent[-1])
    ]
    return in_flight[1] > 1.1 * in_flight[0] + 10


def predict_static_batch(row: Row, spec: ReplicaSpec) -> Prediction:
    """Price the prompts of a batch as one step, and decoding at its mean context."""
    batch, prompt = row.integer("concurrency_or_batch"), row.integer("isl", 32)
    output = row.integer("osl")
    cost = RooflineCost(spec)
    first = cost.step_seconds(0, 0, [(prompt, 0)] * batch)
    step = cost.step_seconds(batch, batch * (prompt + output / 2))
    tokens = batch * output / (first + step * (output - 1))
    if row["kind"] == "static_batch_max":
        return Prediction(tokens_s=tokens / spec.accelerators)
    return Prediction(ttft_ms=first * 1e3, tpot_ms=step * 1e3)


def predict_layer(row: Row, spec: ReplicaSpec) -> Prediction:
    """Price one layer for the tokens of a prompt, or for a batch that decodes."""
    model = msgspec.structs.replace(spec.model, layers=1, vocab=1)
    engine = msgspec.structs.replace(spec.engine, step_ms=0.0, layer_us=0.0, sequence_us=0.0)
    cost = RooflineCost(msgspec.structs.replace(spec, model=model, engine=engine))
    if row["kind"] == "per_layer_prefill":
        return Prediction(ttft_ms=1e3 * cost.step_seconds(0, 0, [(row.integer("isl"), 0)]))
    batch = row.integer("concurrency_or_batch")
    return Prediction(tpot_ms=1e3 * cost.step_seconds(batch, batch * 100))


PREDICTORS: dict[str, Callable[[Row, ReplicaSpec], Prediction]] = {
    "closed_loop": predict_closed_loop,
    "pareto_point": predict_closed_loop,
    "offline_max": predict_offline,
    "poisson_server": predict_server,
    "poisson_interactive": predict_server,
    "static_batch": predict_static_batch,
    "static_batch_max": predict_static_batch,
    "single_request_ttft": predict_static_batch,
    "single_stream": predict_static_batch,
    "per_layer_prefill": predict_layer,
    "per_layer_decode": predict_layer,
}


def predict(hardware: Hardware, row: Row, kernels_of: str | None = None) -> Prediction:
    """Return the prediction for a row, or the reason why there is none."""
    if "gptj" in row["model"] or row["kind"] not in PREDICTORS:
        kind = "beam search" if "gptj" in row["model"] else f"the kind {row['kind']!r}"
        return Prediction(reason=f"{kind} is not modelled")
    try:
        spec = build(hardware, row, kernels_of)
        return PREDICTORS[row["kind"]](row, spec)
    except CapacityError as error:
        return Prediction(reason=str(error))


def compare(
    hardware: Hardware, rows: Iterable[Row], kernels_of: str | None = None
) -> list[Comparison]:
    """Return the comparisons of the rows."""
    results = []
    for row in rows:
        prediction = predict(hardware, row, kernels_of)
        comparison = Comparison(row, prediction)
        throughput = row.number(
            "out_tok_s_per_gpu" if "static" in row["kind"] else "out_tok_s_total"
        )
        measured = {
            "ttft": (prediction.ttft_ms, row.number("ttft_ms_mean") or row.number("ttft_ms_p50")),
            "tpot": (prediction.tpot_ms, row.number("tpot_ms_mean") or row.number("tpot_ms_p50")),
            "throughput": (prediction.tokens_s, throughput),
            "rate": (prediction.requests_s, row.number("arrival_qps")),
        }
        for name, (predicted, value) in measured.items():
            if predicted is not None and value:
                comparison.errors[name] = predicted / value - 1
        results.append(comparison)
    return results


def mape(comparisons: Iterable[Comparison], measure: str) -> tuple[int, float, float]:
    """Return the number of errors of a measure, and their mean and median in percent, without signs."""
    errors = [100 * abs(each.errors[measure]) for each in comparisons if measure in each.errors]
    if not errors:
        return 0, 0.0, 0.0
    return len(errors), statistics.fmean(errors), statistics.median(errors)


MEASURES = ("tpot", "ttft", "throughput", "rate")
TITLES = {"tpot": "TPOT", "ttft": "TTFT", "throughput": "tokens/s", "rate": "highest rate"}
SOURCE_OF_FITS = "h200_sxm"
"""Accelerator on whose rows the coefficients of engines were fitted."""
INTRO = """# Accuracy of the hardware model

Predictions of the model behind `argosy capacity`, compared with all public measurements of
`benchmarks/data/calibration.csv`. `python -m benchmarks.twin_accuracy` writes this page, and
`--rows FILE.csv` prints the same tables for other measurements.

* Each row is replayed by its protocol: a closed loop with its concurrency and lengths, a batch, or arrivals.
* Nothing is tuned for a single row. Efficiencies of kernels come from a database of kernels. Five coefficients of each
  engine were fitted to Llama 3.1 70B in fp8 on H200.
* Three choices looked at other rows, so the figures of these families are no pure predictions. They are the host time
  per layer, the time per step of TensorRT-LLM (8B on H100), and the kernels of experts (gpt-oss, DeepSeek-R1).
* Details of the protocols follow the published scripts, and some were adjusted after comparing.
* Errors are relative and without sign: mean, and median in brackets, in percent. The bias has a sign.
"""
PUBLISHED = """
## Published simulators

Their own figures, on their own rows. They are not comparable one to one.

| Simulator | Error that it states |
| --- | --- |
| Vidur | below 9 % of end-to-end latency |
| LLMServingSim 2.0 | TPOT 0.2 to 1.7 %, TTFT 0.6 to 13.6 %, on GPUs that it profiles |
| BLIS | ITL 7.1 %, TTFT 17.6 % (medians); 13 to 16 % on GPUs that it was not fitted to |
| InferSim | 4 to 15 % of throughput |
| AIConfigurator 0.12.0, on the rows of 70B | TPOT 4 to 35 %, TTFT 17 to 45 % (medians) |
| AIConfigurator 0.12.0, on DeepSeek-R1 | TPOT 22 to 60 %, TTFT 38 to 75 % |

## What it misses, and why

* vLLM on B200: TTFT is 20 to 50 % too short. Prompts run there outside CUDA graphs, whose host time is not modelled.
* gpt-oss with TensorRT-LLM on H200: TPOT is too short. It has other kernels for experts than on Blackwell.
* DeepSeek-R1: TTFT is 40 to 80 % too short in most rows. Waits between ranks, and first runs of kernels, are not
  modelled.
* Runs of 2023 ("static_batch" on A100 and H100) are bound by their hosts, and predicted 30 to 50 % too fast.
* "NVIDIA gap-analysis" rows measure TTFT by another client. Qwen3-32B in fp8 there has blocks of scales, which are
  slower.
* MLPerf's rows have no lengths of prompts and often no parallelism. Means of their data sets are used.
* Limits of memory are right or wrong by one block of requests: close to a limit TTFT can be wrong by any factor.
* Beam search, requests without lengths, and speculation are not predicted.
"""


LIVE = """## Live check

The bundled model on CPUs, as one engine and as three replicas behind a gateway, of which one is killed (`kill -9`).
Prices and the time outside the engine are [fitted](../how-to/twin.md#fit-the-prices-to-your-engine) to one run. The
twin predicts another one with other rates, lengths and another time of the kill, from the trace file that
`argosy bench` sends. Times are in ms; intervals have the uncertainty of the prices only.
"""


def live_section() -> str:
    """Return the section with the newest recorded result of `benchmarks.twin_live`."""
    recorded = sorted(RESULTS.glob("*-twin_live*.json"))
    if not recorded:
        return LIVE + "\nIt was not measured yet.\n"
    result = msgspec.json.decode(recorded[-1].read_bytes())
    rows = [row for row in result["rows"] if "figure" in row]
    machine = result["machine"]
    return (
        f"{LIVE}\n{format_table(rows)}\n\nMeasured on {result['date']} with {machine['cpus']} CPUs "
        f"({machine['cpu']}) by `{result['command']}`: `benchmarks/results/{recorded[-1].name}`.\n"
    )


def _is_dense_70b(comparison: Comparison) -> bool:
    row = comparison.row
    return row["model"] == "Llama-3.1-70B" and row["kind"] == "closed_loop"


def _is_vllm_fp8_hopper(comparison: Comparison) -> bool:
    row = comparison.row
    return (
        _is_dense_70b(comparison)
        and row.engine == "vllm"
        and row["weights"] == "fp8"
        and row["gpu"] in {"h100_sxm", "h200_sxm"}
    )


def _is_moe(comparison: Comparison) -> bool:
    name = comparison.row["model"].lower()
    return comparison.row["kind"] == "closed_loop" and name.startswith(
        ("gpt-oss", "deepseek", "minimax")
    )


def _is_trt_offline(comparison: Comparison) -> bool:
    return comparison.row["id"].startswith("TRT10")


def waits_for_memory(comparisons: Iterable[Comparison]) -> tuple[int, int]:
    """Return how many rows are judged correctly as waiting for KV cache or not, and of how many."""
    right = total = 0
    for each in comparisons:
        free, predicted = each.prediction.unlimited_ttft_ms, each.prediction.ttft_ms
        measured = each.row.number("ttft_ms_mean")
        if free is None or predicted is None or measured is None or not each.row.is_inferencex:
            continue
        total += 1
        limit = WAITS_FOR_MEMORY * free
        right += (predicted > limit) == (measured > limit)
    return right, total


def goals(results: Sequence[Comparison], from_h200: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return a row for each goal: what, goal, reached, and whether it is met."""
    hopper = [each for each in results if _is_vllm_fp8_hopper(each)]
    dense = [each for each in results if _is_dense_70b(each)]
    unseen = [each for each in dense if each.row["gpu"] != SOURCE_OF_FITS]
    figures = [
        ("70B fp8, vLLM, H100 and H200: TPOT", 5.0, mape(hopper, "tpot")[1]),
        ("70B fp8, vLLM, H100 and H200: TTFT", 10.0, mape(hopper, "ttft")[1]),
        ("70B, all engines and GPUs: TPOT", 7.0, mape(dense, "tpot")[1]),
        ("70B, all engines and GPUs: median TTFT", 15.0, mape(dense, "ttft")[2]),
        ("70B, GPUs that were not fitted, own kernels: TPOT", 10.0, mape(unseen, "tpot")[1]),
        ("70B, GPUs that were not fitted, kernels of H200: TPOT", 10.0, mape(from_h200, "tpot")[1]),
        ("Mixtures of experts: TPOT", 15.0, mape(filter(_is_moe, results), "tpot")[1]),
        (
            "TensorRT-LLM 1.0, offline: tokens/s",
            15.0,
            mape(filter(_is_trt_offline, results), "throughput")[1],
        ),
        ("MLPerf, rate within limits", 10.0, mape(results, "rate")[1]),
    ]
    rows: list[tuple[str, ...]] = [
        (name, f"{goal:.0f} %", f"{value:.1f} %", "yes" if value <= goal else "no")
        for name, goal, value in figures
    ]
    right, total = waits_for_memory(results)
    share = 100 * right / max(total, 1)
    detection = f"{share:.1f} % of {total}"
    return [
        *rows,
        ("Requests wait for KV cache or not", "95 %", detection, "yes" if share >= 95 else "no"),
    ]


def compare_from_h200(hardware: Hardware, rows: Sequence[Row]) -> list[Comparison]:
    """Return comparisons of the rows of 70B on other accelerators, with the kernels of H200."""
    others = [
        row for row in rows if row["gpu"] != SOURCE_OF_FITS and row["model"] == "Llama-3.1-70B"
    ]
    closed = [row for row in others if row["kind"] == "closed_loop" and row["weights"] != "fp4"]
    return compare(hardware, closed, SOURCE_OF_FITS)


def family_rows(results: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return a row for each family and measure."""
    families: dict[tuple[str, str], list[Comparison]] = {}
    for each in results:
        families.setdefault((each.row["kind"], each.row.family), []).append(each)
    rows: list[tuple[str, ...]] = []
    for (kind, family), group in sorted(families.items()):
        for measure in MEASURES:
            count, mean, median = mape(group, measure)
            if count:
                bias = statistics.fmean(e.errors[measure] for e in group if measure in e.errors)
                figures = f"{mean:.1f} ({median:.1f})", f"{100 * bias:+.0f}"
                rows.append((kind, family, TITLES[measure], str(count), *figures))
    return rows


def reasons(results: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """Return the reasons why rows have no prediction, with their number."""
    counts: dict[str, int] = {}
    for each in results:
        if each.prediction.reason:
            counts[each.prediction.reason] = counts.get(each.prediction.reason, 0) + 1
    return [(reason, str(count)) for reason, count in sorted(counts.items())]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def render_page(hardware: Hardware, rows: Sequence[Row]) -> str:
    """Return the page with all tables."""
    results = compare(hardware, rows)
    from_h200 = compare_from_h200(hardware, rows)
    compared = sum(bool(each.errors) for each in results)
    return "\n".join(
        [
            INTRO,
            f"{compared} of {len(results)} rows are compared.\n",
            "## Goals\n",
            table(("Rows", "Goal", "Reached", "Met"), goals(results, from_h200)),
            "## By family\n",
            table(("Kind", "Family", "Measure", "Rows", "Error %", "Bias %"), family_rows(results)),
            "## Not predicted\n",
            table(("Reason", "Rows"), reasons(results)),
            PUBLISHED.strip("\n") + "\n",
            live_section(),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line described above and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="CSV file in the format of calibration.csv")
    options = parser.parse_args(arguments)
    page = render_page(load_hardware(), read_rows(options.rows or ROWS))
    if options.rows:
        print(page)
    else:
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
