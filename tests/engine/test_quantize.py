"""`argosy quantize`: rounding against the arithmetic that runs, checkpoints, reports, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.quantization.weight_rounding import (
    InputStatistics,
    Recipe,
    RoundedWeight,
    round_inputs,
    round_to_nearest,
    round_with_feedback,
)
from argosy.model_store import (
    RecipeName,
    compute_manifest,
    find_report_problem,
    list_model_files,
    read_quality_report,
)
from argosy.models import BUNDLED_MODEL
from tests.engine.transformers_reference import make_reference
from tests.support.full_disk import full_disk

RECIPES: list[RecipeName] = ["w8a8", "w4a8-g32", "w4a8-g128"]
WORDS = ("cat", "river", "engine", "blue", "seven", "letters", "of", "the", "quiet", "harbour")


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32), name=st.sampled_from(RECIPES), noise=st.sampled_from([0.0, 0.05])
)
def test_feedback_lowers_the_error_of_outputs(seed: int, name: RecipeName, noise: float) -> None:
    """GPTQ's outputs for actual inputs are closer to those in full precision than rounding to the nearest."""
    generator = torch.Generator().manual_seed(seed)
    recipe, cols = Recipe.named(name), 128
    weight = torch.randn(24, cols, generator=generator)
    mixing = torch.randn(cols, cols, generator=generator)
    full = torch.randn(512, cols, generator=generator) @ mixing
    actual = full + noise * torch.randn(512, cols, generator=generator) @ mixing
    statistics = InputStatistics(cols)
    statistics.add(full, actual)

    def error(rounded: RoundedWeight) -> float:
        outputs = round_inputs(actual) @ rounded.to_grouped().dequantize().T
        return float((outputs - full @ weight.T).square().mean())

    with_feedback = round_with_feedback(weight, statistics, recipe)
    assert error(with_feedback) <= error(round_to_nearest(weight, recipe))
    low, high = (-127, 127) if recipe.bits == 8 else (-8, 7)
    assert low <= int(with_feedback.codes.min()) <= int(with_feedback.codes.max()) <= high


def write_text(file: Path, count: int = 60) -> Path:
    """Write different documents, of which some have messages."""
    lines = []
    for number in range(count):
        words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 30)]
        text = f"{number}: {' '.join(words)}"
        message = {"role": "user", "content": text}
        lines.append(json.dumps({"messages": [message]} if number % 5 == 0 else {"text": text}))
    file.write_text("\n".join(lines) + "\n")
    return file


def copy_tokenizer(folder: Path) -> None:
    for file in BUNDLED_MODEL.glob("*"):
        if file.name.startswith(("tokenizer", "special", "chat")):
            shutil.copy(file, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model with its first layer only."""
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    copy_tokenizer(folder)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(BUNDLED_MODEL / "model.safetensors")
    first = {
        name: each
        for name, each in tensors.items()
        if "layers." not in name or ".layers.0." in name
    }
    save_file(first, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    return write_text(model.parent / "text.jsonl")


def quantize(model: Path, output: Path, text: Path, *options: str) -> tuple[int, str]:
    """Run the command, and return its exit status and what it prints."""
    arguments = [str(model), "--output", str(output), "--calibration", str(text), *options]
    result = CliRunner().invoke(app, ["quantize", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("recipe", "method", "kl"),
    [("w8a8", "rtn", 1), ("w4a8-g32", "awq", 1), ("w4a8-g128", "gptq", 0)],
)
def test_writes_a_checkpoint_with_a_report(
    model: Path, text: Path, tmp_path: Path, recipe: RecipeName, method: str, kl: int
) -> None:
    """The loader computes with the stored integers, which are close to the weights. The report names the digest.

    A model that does not keep a limit stays, so that it can be looked at, but its report does not let it be served.
    """
    output, status = tmp_path / "out", 0 if kl else 3
    limits = ("--gate", "perplexity=50", "--gate", f"kl={kl}", "--gate", "same-top=10")
    options = ("--recipe", recipe, "--method", method, *limits)
    actual, printed = quantize(model, output, text, *options)
    assert (actual, "does not keep its limits: the mean KL" in printed) == (status, status == 3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report = read_quality_report(output)
    assert report is not None
    digest = compute_manifest(list_model_files(output)).digest
    assert report.base_digest == compute_manifest(list_model_files(model)).digest != digest
    assert (report.recipe, report.method, report.kept) == (recipe, method, ())
    problem = find_report_problem(report, digest)
    assert problem is None if status == 0 else "fails: the mean KL" in (problem or "")
    assert "another model" in (find_report_problem(report, report.base_digest) or "")
    reader, base = CheckpointReader(output), CheckpointReader(model)
    part = StoredPart("model.layers.0.self_attn.o_proj.weight")
    assert reader.find_encoded(part) is not None
    weight = base.read_parts([part]).float()
    error = float((reader.read_parts([part]) - weight).abs().mean() / weight.abs().mean())
    assert error < (0.02 if recipe == "w8a8" else 0.3)


def test_experts_without_tokens_are_rounded(text: Path, tmp_path: Path) -> None:
    """Experts of few calibration tokens are counted in the report, and matrices without whole groups are kept."""
    sizes = {"vocab_size": 4104, "num_hidden_layers": 1, "intermediate_size": 96}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    reference = make_reference(tmp_path / "moe", "Mixtral", sizes | experts, dtype=torch.bfloat16)
    copy_tokenizer(reference.path)
    output = tmp_path / "out"
    status, _ = quantize(reference.path, output, text, "--recipe", "w4a8-g32", "--tokens", "256")
    report = read_quality_report(output)
    assert status in (0, 3)
    assert report is not None
    assert len(report.rounded_experts) >= 2
    assert report.kept == ("model.layers.0.block_sparse_moe.gate.weight",)


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"hello", "malformed"),
    "no text": (b'{"title": "a"}', 'neither "text" nor "messages"'),
    "wrong type": (b'{"text": 1}', "Expected `str | null`"),
    "no UTF-8": (b'{"text": "\xff"}', "each line is a JSON object"),
    "lone surrogate": (b'{"text": "\\ud800"}', "each line is a JSON object"),
    "deep": (b'{"messages": ' + b"[" * 100_000, "each line is a JSON object"),
    "no role": (b'{"messages": [{"content": "a"}]}', 'bad.jsonl:1: a message has no "role"'),
    "odd role": (b'{"messages": [{"role": {"a": []}}]}', 'bad.jsonl:1: a message has no "role"'),
    "huge number": (b'{"text": 1e999999}', "each line is a JSON object"),
    "no lines": (b"a" * (17 << 20), "more than 16 MiB"),
    "too few": (b'{"text": "a cat"}', "add different documents"),
    "equal": (b'{"text": "a cat sat on the mat"}\n' * 400, "add different documents"),
    "empty": (b"", "has 0 documents"),
}


@pytest.mark.parametrize("case", list(BAD_LINES))
def test_refuses_calibration_files(model: Path, tmp_path: Path, case: str) -> None:
    content, expected = BAD_LINES[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    status, printed = quantize(model, tmp_path / "out", file, "--recipe", "w8a8")
    assert status == 2
    assert expected in printed
    assert "bad.jsonl" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_refuses_what_it_cannot_quantize(model: Path, text: Path, tmp_path: Path) -> None:
    """Models in other formats, folders that exist, and unknown limits are refused before anything is written."""
    quantized, encoder = tmp_path / "quantized", tmp_path / "encoder"
    for folder, changes in (
        (quantized, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        (encoder, {"architectures": ["GPT2LMHeadModel"]}),
    ):
        shutil.copytree(model, folder)
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    cases: list[tuple[Path, Path, tuple[str, ...], str]] = [
        (quantized, tmp_path / "out", (), "is quantized already (gptq, 4 bits)"),
        (encoder, tmp_path / "out", (), "no family of Argosy's own decoder"),
        (model, tmp_path, (), "exists; remove it"),
        (model, tmp_path / "out", ("--gate", "speed=1"), "there is no limit 'speed'"),
        (model, tmp_path / "out", ("--gate", "kl=x"), "is no number"),
        (tmp_path / "none", tmp_path / "out", (), "there is no directory"),
    ]
    for source, output, options, expected in cases:
        status, printed = quantize(source, output, text, "--recipe", "w8a8", *options)
        assert (status, expected in printed) == (2, True), printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "quantized"]


def test_full_disk_leaves_nothing(model: Path, text: Path, tmp_path: Path) -> None:
    """A folder that a killed process has left of the same target is no obstacle."""
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "shard-00001.safetensors").write_bytes(bytes(8))
    with full_disk(100_000):
        status, printed = quantize(
            model, tmp_path / "out", text, "--recipe", "w8a8", "--method", "rtn"
        )
    assert (status, "the disk is full" in printed) == (2, True), printed
    assert list(tmp_path.iterdir()) == []
