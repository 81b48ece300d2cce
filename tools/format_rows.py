"""Rows of the model table for checkpoint formats, each compared with an independent dequantizer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import test_gguf
from tests.engine.decoder_driver import DecoderDriver
from tests.engine.gguf_reference import write_gguf
from tests.engine.stored_formats import FORMATS, quantize_checkpoint, quantize_experts_to_mxfp4
from tests.engine.transformers_reference import make_reference
from tools.model_comparison import MAX_DIFFERENCE, compare_with_reference, load_own, yes_or_no

from argosy.engine.execution.checkpoint_formats.gguf_file import GGUF_TYPES
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.transformers_reference import Reference

FORMAT_TABLE_HEAD = """\
| Format | Computed as | Weight error | Greedy tokens equal | Difference | Logit error | Same bits in any batch |
|---|---|---|---|---|---|---|
"""
MAX_NATIVE_ERROR = 0.2
"""Largest accepted error of logits with inputs rounded to 8 bits, relative to their standard deviation."""
MAX_WEIGHT_DIFFERENCE = 1e-6
PROJECTION = "model.layers.0.self_attn.o_proj.weight"
"""Matrix whose values and native form stand for those of all others."""
SIZES = {"intermediate_size": 128, "num_hidden_layers": 2, "attention_bias": True}
K_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
"""Sizes that all block types of GGUF divide."""
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}


@dataclass(frozen=True)
class FormatRow:
    """Result of one comparison."""

    name: str
    computed_as: str
    weight_difference: float
    """Largest difference from the independent dequantizer, relative to the largest weight."""
    is_greedy_equal: bool
    max_difference: float
    """Largest difference of a log-probability of the dequantized model."""
    native_error: float
    """Error of the logits as the CPU computes them, relative to their standard deviation."""
    is_exact: bool

    @property
    def passes(self) -> bool:
        """Whether the row is what the documentation promises."""
        return (
            self.is_greedy_equal
            and self.is_exact
            and self.weight_difference <= MAX_WEIGHT_DIFFERENCE
            and self.max_difference <= MAX_DIFFERENCE
            and self.native_error <= MAX_NATIVE_ERROR
        )

    def format(self) -> str:
        """Return the row of a Markdown table."""
        cells = (
            self.name,
            self.computed_as,
            f"{self.weight_difference:.0e}" if self.weight_difference else "0",
            yes_or_no(self.is_greedy_equal),
            f"{self.max_difference:.0e}",
            f"{self.native_error:.1%}",
            yes_or_no(self.is_exact),
        )
        return f"| {' | '.join(cells)} |"


def quantized_rows(text: str) -> Iterator[FormatRow]:
    """Yield the rows of quantized safetensors checkpoints whose name contains `text`."""
    for name, stored_format in FORMATS.items():
        if text not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            reference = make_reference(Path(folder), "Qwen2", SIZES)
            quantize_checkpoint(reference, stored_format)
            yield _compare(name, Path(folder), reference, StoredPart(PROJECTION))
    if text in "mxfp4":
        with tempfile.TemporaryDirectory() as folder:
            reference = make_reference(Path(folder), "GptOss", GPT_OSS)
            quantize_experts_to_mxfp4(reference)
            part = StoredPart("model.layers.0.mlp.experts.down_proj", 0, is_transposed=True)
            yield _compare("mxfp4", Path(folder), reference, part)


def gguf_rows(text: str) -> Iterator[FormatRow]:
    """Yield a row for each GGUF type and family whose name contains `text`."""
    cases: dict[str, tuple[str, dict[str, Any], str]] = {
        each.name: ("Llama", K_BLOCKS, each.name) for each in GGUF_TYPES.values()
    }
    for name, (family, options, kind) in test_gguf.FAMILIES.items():
        cases[f"{name}, {kind}"] = family, options, kind
    for name, (family, options, kind) in cases.items():
        if text not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = test_gguf.MODELS.get(family, "")
            reference = make_reference(Path(folder), family, options, model=model)
            file = Path(folder) / "model.gguf"
            write_gguf(file, reference, kind)
            yield _compare(name, file, reference, StoredPart(PROJECTION))


def _compare(name: str, path: Path, reference: Reference, part: StoredPart) -> FormatRow:
    reader = CheckpointReader(path)
    expected = reference.model.state_dict()[part.name]
    expected = expected if part.entry is None else expected[part.entry]
    expected = expected.mT if part.is_transposed else expected
    difference = (reader.read_parts((part,)) - expected).abs().max() / expected.abs().max()
    matrix = reader.find_encoded(part)
    dequantized = compare_with_reference(reference, DecoderDriver(load_own(path, "none")))
    native = compare_with_reference(reference, DecoderDriver(load_own(path)))
    return FormatRow(
        name,
        "model dtype" if matrix is None else matrix.format.describe(),
        float(difference),
        dequantized.is_greedy_equal,
        dequantized.max_difference,
        native.relative_error,
        dequantized.is_exact and native.is_exact,
    )
