"""What quantized weights cost in quality: perplexity and greedy agreement with bfloat16, one JSON line a case.

    python -m benchmarks.quality [--tokens 20000] [--shape llama-160m]

On the bundled model, with text of a seed that it was not trained on; and on a model of random weights with random
tokens, which knows nothing: there only the agreement tells something, and it is a lower bound, since no token stands
out. Both are taken from the log-probabilities of prompts, as a user would ask for them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from models.corpus.chat import documents
from models.tokenizer import render
from tokenizers import Tokenizer

from argosy import LLM, SamplingParams
from argosy.engine import EngineConfig
from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import SHAPES, make

HELD_OUT_SEED = 1_000_003
FORMATS = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model makes of one token: its natural-log probability, and the likeliest instead."""

    logprob: float
    likeliest: int


def held_out(tokens: int) -> list[list[int]]:
    """Documents of about so many tokens in all, for the bundled model."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    found: list[list[int]] = []
    for document in documents(HELD_OUT_SEED):
        ids = tokenizer.encode(render(document), add_special_tokens=False).ids
        found.append(ids[:512])
        tokens -= len(found[-1])
        if tokens <= 0:
            break
    return found


def noise(tokens: int, vocabulary: int) -> list[list[int]]:
    """Sequences of 256 random tokens."""
    rng = random.Random(0)
    return [[rng.randrange(10, vocabulary) for _ in range(256)] for _ in range(-(-tokens // 256))]


def predictions(model: Path, texts: list[list[int]], quantize: str | None) -> list[Prediction]:
    """The prediction of every token of the texts but the first of each."""
    config = EngineConfig(
        model=str(model),
        dtype="bfloat16",
        quantize=quantize,  # type: ignore[arg-type]
        prefix_cache=False,
    )
    outputs = LLM(config).generate(
        list(texts), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    )
    return [
        Prediction(each.logprob, each.top_logprobs[0][0])
        for output in outputs
        for each in output.prompt_logprobs or []
    ]


def perplexity(found: list[Prediction]) -> float:
    """How many equally likely tokens the model hesitates between, on average."""
    return math.exp(-sum(each.logprob for each in found) / len(found))


def agreement(found: list[Prediction], reference: list[Prediction]) -> float:
    """The share of tokens for which both would have chosen the same instead."""
    pairs = zip(found, reference, strict=True)
    return sum(a.likeliest == b.likeliest for a, b in pairs) / len(found)


def compare(name: str, model: Path, texts: list[list[int]]) -> None:
    """Print a line for each format."""
    reference = predictions(model, texts, None)
    for form in (None, *FORMATS):
        found = predictions(model, texts, form) if form else reference
        line = {
            "model": name,
            "weights": form or "bfloat16",
            "tokens": len(found),
            "perplexity": round(perplexity(found), 4),
            "perplexity_ratio": round(perplexity(found) / perplexity(reference), 5),
            "greedy_agreement": round(agreement(found, reference), 4),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    """Print a JSON line for each model and format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-160m")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    compare("argosy-mini", BUNDLED_MODEL, held_out(options.tokens))
    vocabulary = int(str(SHAPES[options.shape]["vocab_size"]))
    texts = noise(min(options.tokens, 2048), vocabulary)
    compare(f"random {options.shape}", make(options.shape, options.folder), texts)


if __name__ == "__main__":
    main()
