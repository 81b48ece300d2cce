"""Measure the quality of quantized weights: perplexity, and greedy agreement with bfloat16. Prints JSON lines.

    python -m benchmarks.quality [--tokens 20000] [--shape llama-160m]
    python -m benchmarks.quality --recipes [--methods gptq]

The bundled model runs on generated text of a seed that it was not trained on. A model with random weights runs on
random tokens. There only the agreement is meaningful, as a lower bound, since no token has a high probability. Both
figures are computed from prompt log-probabilities of the public API.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from models.chat_format import render
from models.corpus.chat import generate_documents
from tokenizers import Tokenizer

from argosy import LLM, SamplingParams
from argosy.engine import EngineConfig
from argosy.model_store import RecipeName, RoundingMethod
from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import SHAPES, make_checkpoint

HELD_OUT_SEED = 1_000_003
FORMATS = {
    "bfloat16": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "bfloat16, KV int8": {"kv_dtype": "int8"},
}
"""Options of each format."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of one token: its natural-log probability, and the most likely token."""

    logprob: float
    likeliest: int


def held_out(tokens: int) -> list[list[int]]:
    """Return documents for the bundled model with about `tokens` tokens in total."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    documents: list[list[int]] = []
    for document in generate_documents(HELD_OUT_SEED):
        ids = tokenizer.encode(render(document), add_special_tokens=False).ids
        documents.append(ids[:512])
        tokens -= len(documents[-1])
        if tokens <= 0:
            break
    return documents


def noise(tokens: int, vocabulary: int) -> list[list[int]]:
    """Return sequences of 256 random tokens."""
    rng = random.Random(0)
    return [[rng.randrange(10, vocabulary) for _ in range(256)] for _ in range(-(-tokens // 256))]


def predictions(model: Path, texts: list[list[int]], options: dict[str, str]) -> list[Prediction]:
    """Return the prediction of every token of the texts except the first of each text."""
    config = EngineConfig(
        model=str(model),
        dtype="bfloat16",
        prefix_cache=False,
        **options,  # type: ignore[arg-type]
    )
    outputs = LLM(config).generate(
        list(texts), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    )
    return [
        Prediction(token.logprob, token.top_logprobs[0][0])
        for output in outputs
        for token in output.prompt_logprobs or []
    ]


def perplexity(predicted: list[Prediction]) -> float:
    """Return the perplexity: the average number of equally likely tokens."""
    return math.exp(-sum(prediction.logprob for prediction in predicted) / len(predicted))


def agreement(predicted: list[Prediction], reference: list[Prediction]) -> float:
    """Return the share of tokens for which both models have the same most likely token."""
    pairs = zip(predicted, reference, strict=True)
    return sum(a.likeliest == b.likeliest for a, b in pairs) / len(predicted)


def compare(name: str, model: Path, texts: list[list[int]]) -> None:
    """Print a line for each weight format."""
    reference = predictions(model, texts, {})
    for label, options in FORMATS.items():
        predicted = predictions(model, texts, options) if options else reference
        line = {
            "model": name,
            "weights": label,
            "tokens": len(predicted),
            "perplexity": round(perplexity(predicted), 4),
            "perplexity_ratio": round(perplexity(predicted) / perplexity(reference), 5),
            "greedy_agreement": round(agreement(predicted, reference), 4),
        }
        print(json.dumps(line), flush=True)


def quantize(recipe: str, method: str) -> dict[str, object]:
    """Quantize the bundled model in a process of its own, and return its report, seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        output = ("--output", f"{folder}/model", "--recipe", recipe, "--method", method, "--json")
        command = [sys.executable, "-m", "argosy.cli", "quantize", str(BUNDLED_MODEL), *output]
        start, printed = time.perf_counter(), Path(folder) / "printed"
        with printed.open("wb") as file, subprocess.Popen(command, stdout=file) as process:
            _, _, usage = os.wait4(process.pid, 0)
            process.returncode = 0
        seconds = time.perf_counter() - start
        report: dict[str, object] = json.loads(printed.read_bytes().splitlines()[-1])
    return report | {"seconds": round(seconds, 1), "peak_mib": usage.ru_maxrss >> 10}


def main() -> None:
    """Print a JSON line for each model and format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-160m")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument(
        "--recipes", action="store_true", help="compare the recipes and methods of argosy quantize"
    )
    methods = get_args(RoundingMethod)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    options = parser.parse_args()
    if options.recipes:
        for recipe, method in itertools.product(get_args(RecipeName), options.methods):
            print(json.dumps(quantize(recipe, method)), flush=True)
        return
    compare("argosy-mini", BUNDLED_MODEL, held_out(options.tokens))
    vocabulary = int(str(SHAPES[options.shape]["vocab_size"]))
    texts = noise(min(options.tokens, 2048), vocabulary)
    compare(f"random {options.shape}", make_checkpoint(options.shape, options.folder), texts)


if __name__ == "__main__":
    main()
