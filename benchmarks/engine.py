"""Compare Argosy with all installed peers on W1 to W4, in turns, on a random-weight model.

    make peers; python -m benchmarks.engine [--workloads W1,W2,W3,W4] [--engines argosy,vllm,...] [--rounds 1]

W1: 64 requests at once, input 32-512, output 16-128 tokens (uniform, seed 0): output tokens/s.
W2: one request, 256 in, 128 out: TTFT and decode tokens/s.
W3: 32 requests at once with 1,024 shared and 64 own tokens, 32 out: seconds, with the prefix cache off and on.
W4: Poisson arrivals with W1's lengths for 60 s over HTTP, from `argosy bench`: TTFT and ITL.

Prints JSON lines, then a table. Every engine has its own process, which is stopped while another engine computes.
Some engines run only if they are named. Those with quantized weights run W1 and W2, as does `argosy-generic`, which
has transformers' model:

--engines argosy-int8,openvino-int8,llama.cpp-int8,argosy-gptq,vllm-gptq,argosy-q4_k,llama.cpp-q4_k,transformers-cb.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from argosy.bench import BenchError, RequestRow, run_benchmark, summarize
from benchmarks import workloads
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import DEFAULT, ENGINES, ROOT, interpreter
from benchmarks.peers.worker import Settings
from benchmarks.processes import Launch, PeerError, Session, exit_on_sigterm, serve_peer
from benchmarks.report import Limits, Values, machine_rows, markdown, rows
from benchmarks.stored_weights import KINDS, make_stored


@dataclass
class Bench:
    """State of the benchmark run."""

    options: argparse.Namespace
    model: Path
    vocabulary: int
    values: Values = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Reason why an engine, or one of its workloads, is not measured, by engine."""

    def round(self, number: int) -> None:
        """Run each selected workload once on each selected engine."""
        selected = self.options.workloads
        session_workloads = {"W1": "W1", "W2": "W2", "W3": "W3 on"}
        self._offline(
            number,
            [session_workloads[name] for name in session_workloads if name in selected],
            prefix_cache=True,
        )
        if "W3" in selected:
            self._offline(number, ["W3 off"], prefix_cache=False)
        if "W4" in selected:
            for engine in self._with(["W4"]):
                with self._skip_on_error(engine):
                    self._serve(engine, number)

    def _with(self, names: list[str]) -> list[str]:
        """Return the selected engines that run one of these workloads."""
        return [name for name in self.options.engines if ENGINES[name].workloads & set(names)]

    def _offline(self, number: int, names: list[str], *, prefix_cache: bool) -> None:
        with ExitStack() as stack:
            sessions: dict[str, Session] = {}
            for engine in self._with(names):
                with self._skip_on_error(engine):
                    session = Session(self._launch(engine, prefix_cache=prefix_cache))
                    sessions[engine] = stack.enter_context(session)
                    self.versions[engine] = session.version
            for name in names:
                work = workloads.requests(name, number, self.vocabulary)
                for engine in self._with([name]):
                    if engine not in sessions:
                        continue
                    with self._skip_on_error(engine, sessions):
                        sessions[engine].run(workloads.warm_up(name, self.vocabulary))
                        stamps = sessions[engine].run(work)
                        self._add(engine, name, number, workloads.figures(name, work, stamps))

    def _serve(self, engine: str, number: int) -> None:
        """Measure W4, over HTTP if the engine has a server."""
        peer, rate = ENGINES[engine], self.options.rate
        if peer.paced:
            measured = self._paced(engine, rate, number)
        else:
            with serve_peer(self._launch(engine, prefix_cache=True)) as url:
                settings = workloads.served_settings(url, str(self.model), rate, number)
                measured = asyncio.run(run_benchmark(settings, {}, _NoProgress())).runs[0].rows
        self._add(engine, "W4", number, workloads.served_figures(summarize(measured)))

    def _paced(self, engine: str, rate: float, number: int) -> list[RequestRow]:
        work = workloads.paced(workloads.served_plan(rate, number), self.vocabulary)
        with Session(self._launch(engine, prefix_cache=True)) as session:
            self.versions[engine] = session.version
            session.run(workloads.warm_up("W1", self.vocabulary))
            return workloads.rows(work, session.run(work))

    def _launch(self, engine: str, *, prefix_cache: bool) -> Launch:
        peer, options = ENGINES[engine], self.options
        return Launch(
            interpreter(peer.environment, options.environments),
            peer,
            Settings(
                model=str(self._stored(peer.weights)),
                weights=peer.weights,
                threads=options.threads,
                prefix_cache=prefix_cache,
                batching=options.batching if peer.module == "argosy" else peer.batching,
                model_impl=peer.model_impl,
            ),
            log=options.folder / f"{engine}.log",
            patience_s=options.patience,
        )

    def _stored(self, weights: str) -> Path:
        return make_stored(weights, self.model) if weights in KINDS else self.model

    def _add(self, engine: str, name: str, number: int, figures: dict[str, float]) -> None:
        for figure, value in figures.items():
            self.values.setdefault((name, figure), {}).setdefault(engine, {})[number] = value
        text = ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items())
        _log_progress(f"round {number} {name} {engine}: {text}")

    @contextmanager
    def _skip_on_error(
        self, engine: str, sessions: dict[str, Session] | None = None
    ) -> Iterator[None]:
        """Log an engine's error and record it as missing, so that the other engines are still measured."""
        try:
            yield
        except (PeerError, BenchError, FileNotFoundError, ValueError) as error:
            self.missing[engine] = str(error)
            _log_progress(f"{engine}: {error}")
            if sessions is not None and isinstance(error, PeerError):
                del sessions[engine]


class _NoProgress:
    """Progress listener that ignores all events."""

    def on_run_start(self, label: str, requests: int) -> None:
        """Ignore the start."""

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        """Ignore the end."""


def _log_progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def machine(threads: int) -> dict[str, float]:
    """Return the machine's limits from `benchmarks.roofline`, which runs in its own process."""
    command = [sys.executable, "-m", "benchmarks.roofline", "--threads", str(threads)]
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    return {row["machine"]: row["value"] for row in rows}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, temporary = ("W1", "W2", "W3", "W4"), Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-0.5b")
    parser.add_argument("--workloads", type=parse_choices(names), default=list(names))
    parser.add_argument("--engines", type=parse_choices(tuple(ENGINES)), default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--rate", type=float, default=workloads.RATE, help="request rate of W4 in requests/s"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batching", default="continuous", help="batching mode of Argosy")
    parser.add_argument("--folder", type=Path, default=temporary, help="folder for models and logs")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument(
        "--patience", type=float, default=900.0, help="timeout of an answer in seconds"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, then print the rows and the table."""
    options = _options()
    exit_on_sigterm()
    config = SHAPES[options.shape]
    bench = Bench(
        options, make_checkpoint(options.shape, options.folder), int(str(config["vocab_size"]))
    )
    machine_limits = machine(options.threads)
    for number in range(options.rounds):
        bench.round(number)
    limits = Limits(machine_limits, config)
    table = rows(bench.values, bench.versions, bench.missing, limits)
    for row in [*machine_rows(machine_limits, options.threads), *table]:
        print(json.dumps(row | {"shape": options.shape}))
    print(markdown(bench.values, bench.missing, limits))


if __name__ == "__main__":
    main()
