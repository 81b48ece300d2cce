"""Workloads W1 to W4: their requests, their figures, and the comparison of engines."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence

from argosy.bench import (
    ArrivalProcess,
    BenchSettings,
    BenchTarget,
    LoadPlan,
    LoadSpec,
    RequestRow,
    RunSummary,
    Workload,
    build_plan,
    parse_length_distribution,
)
from argosy.bench.plan import SyntheticPrompt
from benchmarks.peers.worker import Request, Stamps

OFFLINE = ("W1", "W2", "W3 off", "W3 on")
"""Workloads that are measured in process. W3 runs without and with the prefix cache."""
NAMES = (*OFFLINE, "W4")
SPECIAL = 10
"""Lowest token id that is drawn. Lower ids are special tokens."""
WARM_REQUESTS, WARM_OUTPUT = 4, 8
RATE, DURATION_S = 1.54, 60.0
PERCENTILES = ("p50", "p99")


def requests(name: str, seed: int, vocabulary: int) -> list[Request]:
    """Return the requests of W1, W2 or W3. Lengths always have seed 0, contents have `seed`."""
    lengths, rng = random.Random(0), random.Random(f"{name} {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(SPECIAL, vocabulary) for _ in range(count)]

    if name == "W1":
        sizes = [(lengths.randint(32, 512), lengths.randint(16, 128)) for _ in range(64)]
        return [Request(tokens(size), output) for size, output in sizes]
    if name == "W2":
        return [Request(tokens(256), 128)]
    shared = tokens(1024)
    return [Request(shared + tokens(64), 32) for _ in range(32)]


def warm_up(name: str, vocabulary: int) -> list[Request]:
    """Return a few short requests of the same kind that share no prefix with the measured requests."""
    return [
        Request(request.prompt, min(request.output, WARM_OUTPUT))
        for request in requests(name, -1, vocabulary)[:WARM_REQUESTS]
    ]


def figures(name: str, work: Sequence[Request], stamps: Stamps) -> dict[str, float]:
    """Return the figures of W1, W2 or W3.

    Raises:
        ValueError: A request was not answered.
    """
    if len(stamps) != len(work) or not all(stamps):
        raise ValueError(f"{name}: {sum(map(bool, stamps))} of {len(work)} requests were answered")
    total_s = max(times[-1] for times in stamps)
    output = sum(request.output for request in work)
    if name == "W1":
        return {"out_tok_s": output / total_s}
    if name == "W2":
        first_s = stamps[0][0]
        decode = (output - 1) / (total_s - first_s)
        return {"ttft_ms": first_s * 1e3, "decode_tok_s": decode}
    return {"total_s": total_s}


def served_settings(url: str, tokenizer: str, rate: float, seed: int) -> BenchSettings:
    """Return W4 for the load generator: Poisson arrivals with W1's lengths, and prompts of token ids."""
    return BenchSettings(
        target=BenchTarget(url=url, prompt_form="tokens", tokenizer=tokenizer),
        workload=Workload(
            input=parse_length_distribution("uniform:32-512"),
            output=parse_length_distribution("uniform:16-128"),
        ),
        loads=(
            LoadSpec(
                arrivals=ArrivalProcess(rate=rate), duration_s=DURATION_S, warmup=WARM_REQUESTS
            ),
        ),
        seed=seed,
    )


def served_plan(rate: float, seed: int) -> LoadPlan:
    """Return the plan of W4, for an engine without a server."""
    settings = served_settings("http://127.0.0.1", "", rate, seed)
    return build_plan(settings.workload, settings.loads[0], seed)


def paced(plan: LoadPlan, vocabulary: int) -> list[Request]:
    """Return the requests of a plan with their arrival times."""
    rng = random.Random(0)
    return [
        Request(
            [rng.randrange(SPECIAL, vocabulary) for _ in range(request.prompt.tokens)],
            request.output_tokens,
            request.at_s or 0.0,
        )
        for (request,) in plan.sessions
        if isinstance(request.prompt, SyntheticPrompt)
    ]


def rows(work: Sequence[Request], stamps: Stamps) -> list[RequestRow]:
    """Return the results of an engine that is driven in process as rows of the load generator."""
    return [
        RequestRow(
            index=index,
            session=index,
            turn=0,
            phase="measured",
            outcome="ok" if len(times) == request.output else "error",
            scheduled_s=request.at_s,
            sent_s=request.at_s,
            end_s=times[-1] if times else request.at_s,
            chunks_s=times,
            planned_input=len(request.prompt),
            planned_output=request.output,
            output_tokens=len(times),
        )
        for index, (request, times) in enumerate(zip(work, stamps, strict=True))
    ]


def served_figures(summary: RunSummary) -> dict[str, float]:
    """Return the figures of W4.

    Raises:
        ValueError: A request failed, or had other lengths than planned.
    """
    total = summary.completed + summary.failed + summary.cancelled
    mismatches = max(summary.input_mismatches, summary.output_mismatches)
    wrong = summary.failed + summary.cancelled + mismatches
    if wrong or not total:
        raise ValueError(
            f"W4: {wrong} of {total} requests failed or had other lengths than planned"
        )
    latencies = {"ttft": summary.latency["ttft"], "itl": summary.latency["itl"]}
    return {
        f"{metric}_{percentile}_ms": float(getattr(stats, percentile))
        for metric, stats in latencies.items()
        for percentile in PERCENTILES
    }


def more_is_better(figure: str) -> bool:
    """Return whether a higher value is better, as for rates. Lower times are better."""
    return figure.endswith("tok_s")


def best_peer(figure: str, peers: Mapping[str, Mapping[int, float]]) -> str | None:
    """Return the peer with the best median over its rounds, or None without peers."""
    medians = {name: statistics.median(values.values()) for name, values in peers.items() if values}
    if not medians:
        return None
    choose = max if more_is_better(figure) else min
    return choose(medians, key=lambda name: medians[name])


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Return the median of the ratio over the rounds that both have, or None without such a round."""
    common_rounds = ours.keys() & theirs.keys()
    return (
        statistics.median(ours[key] / theirs[key] for key in common_rounds)
        if common_rounds
        else None
    )
