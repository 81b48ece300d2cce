"""Cost of constrained sampling: compile times, mask times and throughput. Prints a JSON line per case.

python -m benchmarks.grammar [--ranks qwen.tiktoken --vocabularies 32000 151936]

A rank file in tiktoken's format gives vocabularies of other sizes than the bundled model's, as the package `dashscope`
contains one (dashscope/resources/qwen.tiktoken). The first ranks of such a file are a vocabulary too.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.grammar import (
    GrammarCompiler,
    GrammarTokenizer,
    TokenConstraint,
    build_grammar_tokenizer,
)
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "user", "guest"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "email", "role", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "tiny": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    },
    "person": PERSON,
    "tree": {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
        },
        "required": ["value", "children"],
        "additionalProperties": False,
    },
    "50 properties": {
        "type": "object",
        "properties": {
            f"field_{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 5 + 1},20}}$"}
            for i in range(50)
        },
        "required": [f"field_{i}" for i in range(50)],
        "additionalProperties": False,
    },
    "40 tools": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": f"tool_{i}"}}
                | {f"argument_{i}_{j}": {"type": ["string", "null"]} for j in range(10)},
                "required": ["name"],
                "additionalProperties": False,
            }
            for i in range(40)
        ]
    },
}
FREE_TEXT = json.dumps({"grammars": [{"lark_grammar": r"start: /(.|\n)*/"}]})
PEOPLE = {"type": "array", "items": PERSON, "minItems": 20}


class RankTable:
    """Vocabulary of a rank file. It encodes nothing, so that forced texts are encoded greedily."""

    added_ids: frozenset[int] = frozenset()

    def __init__(self, file: Path) -> None:
        lines = file.read_bytes().split(b"\n")
        self._pieces = [base64.b64decode(line.split()[0]) for line in lines if line]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Return no tokens."""
        del text, add_special_tokens
        return []


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of compact documents."""
    compact = schema | {"x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": compact}]})


def measure_grammar(tokenizer: GrammarTokenizer, grammar: str, tokens: int) -> dict[str, float]:
    """Measure the compilation of a grammar, and the masks of random outputs with `tokens` tokens in all."""
    compiler = GrammarCompiler(lambda: tokenizer)
    compiled = compiler.submit(grammar).result()
    rng = random.Random(1)
    params = SamplingParams(grammar=grammar)
    fill_us: list[float] = []
    while len(fill_us) < tokens:
        constraint = TokenConstraint(
            params, vocab_size=tokenizer.vocab_size, grammar=compiled, eos_token_ids=[0]
        )
        for _ in range(tokens):
            started_at = time.perf_counter()
            matcher = constraint.active_matcher
            if matcher is None:
                break
            row = np.frombuffer(bytearray(matcher.compute_bitmask()), np.int32)
            constraint.complete_row(row)
            spent_s = time.perf_counter() - started_at
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            started_at = time.perf_counter()
            constraint.accept([token])
            fill_us.append((spent_s + time.perf_counter() - started_at) * 1e6)
    compiler.close()
    p50, p99 = np.percentile(fill_us, [50, 99])
    return {
        "compile_ms": round(compiler.compile_s * 1e3, 2),
        "mask_p50_us": round(float(p50), 1),
        "mask_p99_us": round(float(p99), 1),
        "mask_max_us": round(max(fill_us), 1),
    }


def measure_batch(core: EngineCore, grammar: str, rows: int, tokens: int) -> dict[str, float]:
    """Measure the throughput of `rows` requests of `tokens` tokens each."""
    before = core.step().stats
    params = SamplingParams(
        max_tokens=tokens, min_tokens=tokens, ignore_eos=not grammar, grammar=grammar
    )
    for row in range(rows):
        core.add(EngineRequest(id=str(row), prompt=[*range(20, 50), row + 60], params=params))
    started_at, generated = time.perf_counter(), 0
    while core.has_work:
        outputs = core.step()
        generated += sum(len(delta.tokens) for delta in outputs.deltas)
    seconds, after = time.perf_counter() - started_at, outputs.stats
    steps = after.step - before.step
    return {
        "tokens_per_s": round(generated / seconds),
        "mask_fill_ms": round(
            (after.mask_fill_s_total - before.mask_fill_s_total) / steps * 1e3, 3
        ),
        "mask_wait_ms": round(
            (after.mask_wait_s_total - before.mask_wait_s_total) / steps * 1e3, 3
        ),
    }


def main() -> None:
    """Print a line for each vocabulary and grammar, and for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=Path, help="rank file in tiktoken's format")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=(32000, 151936))
    parser.add_argument("--tokens", type=int, default=2000, help="masks of each case")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each batch")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    bundled = Tokenizer.load(BUNDLED_MODEL)
    vocabularies: list[tuple[Any, int]] = [(bundled, bundled.vocab_size)]
    if options.ranks is not None:
        table = RankTable(options.ranks)
        vocabularies += [(table, size) for size in options.vocabularies]
    grammars = {name: schema_grammar(schema) for name, schema in SCHEMAS.items()}
    for table, size in vocabularies:
        started_at = time.perf_counter()
        tokenizer = build_grammar_tokenizer(table, size)
        build_s = round(time.perf_counter() - started_at, 3)
        print(json.dumps({"vocabulary": size, "tokenizer_build_s": build_s}), flush=True)
        for name, grammar in (grammars | {"free text": FREE_TEXT}).items():
            line = measure_grammar(tokenizer, grammar, options.tokens)
            print(json.dumps({"vocabulary": size, "grammar": name, **line}), flush=True)
    config = EngineConfig(model=str(BUNDLED_MODEL), threads=options.threads, num_blocks=2048)
    core = EngineCore(config, time.monotonic, lambda _what, _done: None)
    for name, grammar in {
        "none": "",
        "people": schema_grammar(PEOPLE),
        "free text": FREE_TEXT,
    }.items():
        runs = [measure_batch(core, grammar, options.rows, 100) for _ in range(options.repeats)]
        best = max(runs, key=lambda run: run["tokens_per_s"])
        print(json.dumps({"batch": name, "rows": options.rows, **best}), flush=True)


if __name__ == "__main__":
    main()
