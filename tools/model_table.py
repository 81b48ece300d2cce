"""Table of model families and variants, each compared with transformers on a tiny random model.

    python -m tools.model_table             compute all rows and write docs/reference/models.md
    python -m tools.model_table --only gpt  compute and print the rows whose name contains a text

A row is one checkpoint that transformers wrote. Its greedy tokens and log-probabilities in float32 are compared with
those of transformers. Its logits alone, batched and in chunks are compared with each other, bit for bit. To add rows,
for example of checkpoint formats, add a function to `SECTIONS`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from tests.engine import generic_cases, test_families
from tests.engine.decoder_driver import DecoderDriver
from tests.engine.transformers_reference import SIZES, VOCAB, Reference, make_reference

from argosy.engine.execution.architecture_config import read_architecture
from argosy.engine.execution.checkpoint_reader import CheckpointReader
from argosy.engine.execution.device import create_cpu_device
from argosy.engine.execution.generic_loader import load_generic_decoder
from argosy.engine.execution.model_selection import build_transformers_model
from argosy.engine.execution.weight_loader import load_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from argosy.engine.execution.decoder import Decoder
    from argosy.engine.execution.generic_decoder import GenericDecoder

TARGET = Path(__file__).parents[1] / "docs/reference/models.md"
INTRODUCTION = Path(__file__).with_name("model_table.md")
LENGTHS = (1, 2, 17, 33, 70)
GREEDY_TOKENS = 16
TABLE_HEAD = """\
| Model | Variant | Greedy tokens equal | Largest difference | Same bits in any batch |
|---|---|---|---|---|
"""
MAX_DIFFERENCE = 1e-4
"""Largest accepted difference of a log-probability."""


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
    is_greedy_equal: bool
    max_difference: float
    is_exact: bool

    @property
    def passes(self) -> bool:
        """Whether the row is what the documentation promises."""
        return self.is_greedy_equal and self.is_exact and self.max_difference <= MAX_DIFFERENCE

    def format(self) -> str:
        """Return the row of a Markdown table."""
        equal, exact = (
            "yes" if value else "**no**" for value in (self.is_greedy_equal, self.is_exact)
        )
        return f"| {self.name} | {self.variant} | {equal} | {self.max_difference:.0e} | {exact} |"


def own_cases() -> Iterator[Case]:
    """Yield the cases of Argosy's own decoder."""
    for name, (family, options) in test_families.FAMILIES.items():
        model = test_families.MODELS.get(family, "")
        yield Case(name, _describe(options), family, options, model)
    for name, rope in test_families.ROPES.items():
        yield Case("llama", f"RoPE {name}", "Llama", {"rope_parameters": rope})
    yield Case("llama", "in shards", "Llama", {}, shard="60KB")
    yield Case("llama", "three EOS ids", "Llama", {"eos_token_id": [2, 5, 9]})
    yield Case("llama", "head_dim 128, ragged sizes", "Llama", _ragged(128))
    yield Case("qwen 3", "head_dim 18, ragged sizes", "Qwen3", _ragged(18))


def generic_cases_of_transformers() -> Iterator[Case]:
    """Yield the cases of the implementation of transformers."""
    for name, (family, options) in generic_cases.GENERIC_FAMILIES.items():
        model = generic_cases.GENERIC_MODELS.get(family, "")
        min_length = 2 if name == "llama with longrope" else 1
        yield Case(name, _describe(options), family, options, model, min_length=min_length)
    for name, (family, options) in generic_cases.MULTIMODAL.items():
        yield Case(name, "text", family, options, f"{family}ForConditionalGeneration")


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
        return _compare_results(case, reference, DecoderDriver(decoder))


def _compare_results(case: Case, reference: Reference, driver: DecoderDriver) -> Row:
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in LENGTHS
        if length >= case.min_length
    ]
    alone = [driver.logits_in_one_chunk(prompt) for prompt in prompts]
    differences = [
        (logits.log_softmax(-1) - reference.logits(prompt).log_softmax(-1)).abs().max()
        for logits, prompt in zip(alone, prompts, strict=True)
    ]
    together = driver.forward([(f"t{i}", prompt) for i, prompt in enumerate(prompts)])
    longest = prompts[-1]
    chunks = [longest[:1], longest[1:9], longest[9:41], longest[41:]]
    parts = [driver.forward([("n", [7]), ("c", chunk)])[1] for chunk in chunks]
    is_exact = all(map(torch.equal, alone, together)) and torch.equal(torch.cat(parts), alone[-1])
    some_prompts = prompts[1:4]
    expected = [reference.greedy(prompt, GREEDY_TOKENS) for prompt in some_prompts]
    return Row(
        case.name,
        case.variant,
        driver.greedy(some_prompts, GREEDY_TOKENS) == expected,
        float(max(differences)),
        is_exact,
    )


def load_own(path: Path) -> Decoder:
    """Load a checkpoint into Argosy's own decoder, in float32."""
    device = create_cpu_device(1)
    return load_decoder(
        CheckpointReader(path), read_architecture(path), device, torch.float32, lambda _: None
    )


def load_with_transformers(path: Path) -> GenericDecoder:
    """Load a checkpoint into the implementation of transformers, in float32."""
    model = build_transformers_model(path, torch.float32)
    return load_generic_decoder(model, create_cpu_device(1), torch.float32, lambda _: None)


def own_rows(text: str) -> Iterator[Row]:
    """Yield the rows of Argosy's own decoder whose name contains `text`."""
    yield from (compare(case, load_own) for case in own_cases() if text in case.name)


def transformers_rows(text: str) -> Iterator[Row]:
    """Yield the rows of the implementation of transformers whose name contains `text`."""
    yield from (
        compare(case, load_with_transformers)
        for case in generic_cases_of_transformers()
        if text in case.name
    )


SECTIONS: dict[str, Callable[[str], Iterator[Row]]] = {
    "Argosy's own decoder": own_rows,
    "Models of transformers": transformers_rows,
}
"""Heading -> function of a text that yields the rows whose name contains it."""


def _ragged(head_dim: int) -> dict[str, Any]:
    return {"head_dim": head_dim, "hidden_size": 60, "intermediate_size": 92, "vocab_size": VOCAB}


_OMITTED = {"rope_theta", "short_factor", "long_factor"}
"""Options of a RoPE that are numbers without meaning for a reader."""


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
    for heading, rows in SECTIONS.items():
        text += f"\n## {heading}\n\n{TABLE_HEAD}"
        for row in rows(only):
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
