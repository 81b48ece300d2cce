"""Measure what drafts cost where they fail, and what predictions save. Prints JSON lines.

    python -m benchmarks.draft_costs [--seconds 190] [--batch 1 8 32] [--tokens 128] [--threads 2] [--workload NAME]
                                     [--draft-model argosy-mini-draft] [--model PATH]

Two engine cores of one model, without drafts and with them, run the same requests in turn, in this process. A row has
the median ratio of their times from the first token on, beyond the step with the first drafts, and the first and third
quartile. Outputs are compared: a difference ends the run. Workloads:

random: each three of four tokens recur soon, and what follows is random. Prompt lookup fails most of the time.
wrong: a prediction that is wrong at each fourth token.
switching: a prediction that is right for 20 tokens, then wrong for 20.
chat: an answer of the bundled model, which repeats little.
right: a prediction that is the answer.
edit: a prediction of which each twentieth token is another one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams

if TYPE_CHECKING:
    from argosy.engine.serving.engine_core.core import EngineCore

WORKLOADS = ("random", "wrong", "switching", "chat", "right", "edit")
MIN_ROUNDS = 3


def create_requests(workload: str, count: int, tokens: int) -> list[EngineRequest]:
    """Return the requests of a workload, without their predictions."""
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    if workload != "chat":
        params = msgspec.structs.replace(params, allowed_token_ids=[*range(700, 704)])
    rng = random.Random(1)
    return [
        EngineRequest(
            id=str(seed),
            prompt=[rng.randrange(300, 3000) for _ in range(64)],
            params=msgspec.structs.replace(params, seed=seed),
        )
        for seed in range(count)
    ]


def predict(workload: str, request: EngineRequest, output: list[int]) -> EngineRequest:
    """Add the prediction of a workload to a request."""
    changes = {"wrong": (4, 3), "switching": (40, 20), "right": (1, 1), "edit": (20, 19)}
    if workload not in changes:
        return request
    period, first = changes[workload]
    prediction = [705 if index % period >= first else token for index, token in enumerate(output)]
    return msgspec.structs.replace(request, prediction=prediction)


def count_drafts(core: EngineCore) -> tuple[int, int]:
    """Return the number of drafts since the start, and of those that were accepted."""
    if core.speculation is None:
        return 0, 0
    stats = core.speculation.stats
    return stats.draft_tokens.total(), stats.accepted_tokens.total()


def run(core: EngineCore, requests: list[EngineRequest]) -> tuple[float, dict[str, list[int]]]:
    """Return the seconds from the first tokens on, without the step of the first drafts, and the outputs."""
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    total_s, has_drafted = 0.0, False
    before = count_drafts(core)
    while core.has_work:
        started_at = time.perf_counter()
        step = core.step()
        elapsed_s = time.perf_counter() - started_at
        is_first = not has_drafted and count_drafts(core) > before
        has_drafted = has_drafted or is_first
        if all(outputs.values()) and not is_first:
            total_s += elapsed_s
        for delta in step.deltas:
            outputs[delta.id] += delta.tokens
    return total_s, outputs


def compare(
    cores: tuple[EngineCore, EngineCore], workload: str, count: int, tokens: int, seconds: float
) -> dict[str, object]:
    """Return the row of a workload and a batch size, measured for some seconds and at least `MIN_ROUNDS` rounds."""
    requests = create_requests(workload, count, tokens)
    _, expected = run(cores[0], requests)
    requests = [predict(workload, request, expected[request.id]) for request in requests]
    ratios: list[float] = []
    deadline = time.perf_counter() + seconds
    before = count_drafts(cores[1])
    run(cores[1], requests)  # learns the durations
    while len(ratios) < MIN_ROUNDS or time.perf_counter() < deadline:
        times_s = [0.0, 0.0]
        for index in (0, 1) if len(ratios) % 2 else (1, 0):
            times_s[index], outputs = run(cores[index], requests)
            if outputs != expected:
                sys.exit(f"{workload}: outputs differ")
        ratios.append(times_s[1] / times_s[0])
    low, median, high = statistics.quantiles(ratios, n=4)
    drafted, accepted = (
        now - earlier for now, earlier in zip(count_drafts(cores[1]), before, strict=True)
    )
    return {
        "workload": workload,
        "batch": count,
        "ratio": round(median, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(ratios),
        "ms_per_token_without": round(1000 * times_s[0] / (tokens - 1), 3),
        "drafts_per_run": round(drafted / (1 + len(ratios))),
        "acceptance": round(accepted / max(1, drafted), 3),
    }


def main() -> None:
    """Print a JSON line for each workload and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=190.0, help="for everything but the start")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--draft-model", help="instead of drafts from texts")
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    options = parser.parse_args()
    for name, value in COMPUTE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from argosy.engine.serving.engine_core.core import EngineCore

    def create_core(speculation: str, draft_model: str | None) -> EngineCore:
        config = EngineConfig(
            model=options.model,
            threads=options.threads,
            max_seqs=max(options.batch),
            num_blocks=max(options.batch) * (2 + (64 + options.tokens) // 16) * 2,
            speculation=speculation,
            draft_model=draft_model,
            max_steps_in_flight=0,
        )
        return EngineCore(config, time.monotonic, lambda _what, _done: None)

    cores = create_core("off", None), create_core("auto", options.draft_model)
    if cores[1].speculation is None:
        sys.exit("the engine does not draft here; its log says why")
    if options.draft_model:
        cores[1].speculation.drafters = []
    weights = [count**0.5 for count in options.batch]
    for workload in options.workload:
        for count, weight in zip(options.batch, weights, strict=True):
            seconds = options.seconds / len(options.workload) * weight / sum(weights)
            print(json.dumps(compare(cores, workload, count, options.tokens, seconds)), flush=True)


if __name__ == "__main__":
    main()
