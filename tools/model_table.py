"""Table of model families, variants and checkpoint formats, each compared on a tiny random model.

    python -m tools.model_table             compute all rows and write docs/reference/models.md
    python -m tools.model_table --only gpt  compute and print the rows whose name contains a text

A row is one checkpoint that transformers wrote. Its greedy tokens and log-probabilities in float32 are compared with
those of transformers. Its logits alone, batched and in chunks are compared with each other, bit for bit. To add rows,
add a case to `own_cases` or `transformers_cases`, or a function to `SECTIONS`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import torch
from tests.engine import generic_cases, test_families
from tests.engine.decoder_driver import DecoderDriver
from tests.engine.transformers_reference import SIZES, VOCAB, make_reference
from tools.format_rows import FORMAT_TABLE_HEAD, gguf_rows, quantized_rows
from tools.model_comparison import (
    MAX_DIFFERENCE,
    Comparison,
    compare_with_reference,
    load_own,
    load_with_transformers,
    yes_or_no,
)
from tools.pooling_rows import POOLING_TABLE_HEAD, pooling_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from argosy.engine.execution.decoders.decoder import Decoder
    from argosy.engine.execution.decoders.generic_decoder import GenericDecoder

TARGET = Path(__file__).parents[1] / "docs/reference/models.md"
INTRODUCTION = Path(__file__).with_name("model_table.md")
TABLE_HEAD = """\
| Model | Variant | Greedy tokens equal | Largest difference | Same bits in any batch |
|---|---|---|---|---|
"""


class TableRow(Protocol):
    """Row of a table."""

    @property
    def name(self) -> str:
        """First cell."""
        ...

    @property
    def passes(self) -> bool:
        """Whether the row is what the documentation promises."""
        ...

    def format(self) -> str:
        """Return the row of a Markdown table."""
        ...


@dataclass(frozen=True)
class Case:
    """Checkpoint to compare."""

    name: str
    variant: str
    family: str
    options: dict[str, Any]
    model: str = ""
    shard: str = "1GB"
    min_length: int = 1
    """Shortest prompt that is compared, for models whose results depend on the length in transformers."""


@dataclass(frozen=True)
class Row:
    """Result of one comparison."""

    name: str
    variant: str
    comparison: Comparison

    @property
    def passes(self) -> bool:
        """Whether the row is what the documentation promises."""
        found = self.comparison
        return found.is_greedy_equal and found.is_exact and found.max_difference <= MAX_DIFFERENCE

    def format(self) -> str:
        """Return the row of a Markdown table."""
        found = self.comparison
        equal, exact = yes_or_no(found.is_greedy_equal), yes_or_no(found.is_exact)
        return f"| {self.name} | {self.variant} | {equal} | {found.max_difference:.0e} | {exact} |"


@dataclass(frozen=True)
class Section:
    """Table under a heading."""

    rows: Callable[[str], Iterator[TableRow]]
    """Yields the rows whose name contains a text."""
    head: str = TABLE_HEAD


def own_cases() -> Iterator[Case]:
    """Yield the cases of Argosy's own decoder."""
    for name, (family, options) in test_families.FAMILIES.items():
        model = test_families.MODELS.get(family, "")
        yield Case(name, _describe(options), family, options, model)
    yield from _variants("llama", "Llama", {})
    for factors, original in (("long", 1), ("short", SIZES["max_position_embeddings"])):
        rope = test_families.LONG | {"attention_factor": 1.2}
        options = {"rope_parameters": rope, "original_max_position_embeddings": original}
        yield Case("phi 3", f"RoPE longrope, {factors} factors", "Phi3", options, min_length=2)
    yield Case("qwen 3", "head_dim 18, ragged sizes", "Qwen3", _ragged(18))


def transformers_cases() -> Iterator[Case]:
    """Yield the cases of the implementation of transformers."""
    for name, (family, options) in generic_cases.GENERIC_FAMILIES.items():
        model = generic_cases.GENERIC_MODELS.get(family, "")
        min_length = 2 if name == "llama with longrope" else 1
        yield Case(name, _describe(options), family, options, model, min_length=min_length)
    for name, (family, options) in generic_cases.MULTIMODAL.items():
        yield Case(name, "text", family, options, f"{family}ForConditionalGeneration")
    yield from _variants("arcee", "Arcee", {})
    yield Case("arcee", "biases", "Arcee", {"attention_bias": True, "mlp_bias": True})


def _variants(name: str, family: str, options: dict[str, Any]) -> Iterator[Case]:
    """Yield the variants that every family may have."""
    for rope, parameters in test_families.ROPES.items():
        yield Case(name, f"RoPE {rope}", family, options | {"rope_parameters": parameters})
    yield Case(name, "tied embeddings", family, options | {"tie_word_embeddings": True})
    yield Case(name, "in shards", family, options, shard="60KB")
    yield Case(name, "three EOS ids", family, options | {"eos_token_id": [2, 5, 9]})
    yield Case(name, "head_dim 128, ragged sizes", family, options | _ragged(128))


def compare(case: Case, load: Callable[[Path], Decoder | GenericDecoder]) -> Row:
    """Write the checkpoint of a case, load it, and compare its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        reference = make_reference(
            path, case.family, case.options, model=case.model, shard=case.shard
        )
        decoder = load(path)
        stated = case.options.get("eos_token_id", SIZES["eos_token_id"])
        expected_eos = tuple(stated) if isinstance(stated, list) else (stated,)
        if decoder.architecture.eos_token_ids != expected_eos:
            raise ValueError(f"{case.name}: EOS ids {decoder.architecture.eos_token_ids}")
        if case.shard != Case.shard and len(list(path.glob("*.safetensors"))) < 2:
            raise ValueError(f"{case.name}: the checkpoint has one file")
        comparison = compare_with_reference(reference, DecoderDriver(decoder), case.min_length)
        return Row(case.name, case.variant, comparison)


def own_rows(text: str) -> Iterator[Row]:
    """Yield the rows of Argosy's own decoder whose name contains `text`."""
    yield from (compare(case, load_own) for case in own_cases() if text in case.name)


def transformers_rows(text: str) -> Iterator[Row]:
    """Yield the rows of the implementation of transformers whose name contains `text`."""
    yield from (
        compare(case, load_with_transformers) for case in transformers_cases() if text in case.name
    )


SECTIONS = {
    "Argosy's own decoder": Section(own_rows),
    "Models of transformers": Section(transformers_rows),
    "Embeddings and scores": Section(pooling_rows, POOLING_TABLE_HEAD),
    "Quantized checkpoints": Section(quantized_rows, FORMAT_TABLE_HEAD),
    "GGUF files": Section(gguf_rows, FORMAT_TABLE_HEAD),
}
"""Tables by their headings."""


def _ragged(head_dim: int) -> dict[str, Any]:
    return {"head_dim": head_dim, "hidden_size": 60, "intermediate_size": 92, "vocab_size": VOCAB}


def _describe(options: dict[str, Any]) -> str:
    """Return the options that shape the model, for a reader who knows config.json."""
    parts = []
    for key, value in options.items():
        if isinstance(value, dict):
            parts += [
                f"{name} {item}" for name, item in value.items() if not isinstance(item, list)
            ]
        elif isinstance(value, bool):
            parts.append(key if value else f"no {key}")
        elif isinstance(value, int | float):
            parts.append(f"{key} {value}")
    return ", ".join(parts).replace("rope_type default, ", "") or "defaults"


def main() -> None:
    """Compute the rows, and write or print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="compute and print only rows with this text")
    only = parser.parse_args().only
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    text = INTRODUCTION.read_text()
    failed = []
    for heading, section in SECTIONS.items():
        text += f"\n## {heading}\n\n{section.head}"
        for row in section.rows(only):
            sys.stdout.write(f"{row.format()}\n")
            sys.stdout.flush()
            text += f"{row.format()}\n"
            failed += [] if row.passes else [row.name]
    if not only:
        TARGET.write_text(text)
    if failed:
        sys.exit(f"these rows differ: {', '.join(failed)}")


if __name__ == "__main__":
    main()
