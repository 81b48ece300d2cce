"""`argosy serve` on a directory or file of each kind, as its user would start it: the answer streams."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.stored_formats import FORMATS, quantize_checkpoint, quantize_experts_to_mxfp4
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.transformers_reference import Reference, make_reference
from tests.support.export_gguf import export
from tests.support.serve_process import ServeProcess, run_serve
from tests.unit.serving.test_tokenizer_files import (
    sentencepiece_model,
    sentencepiece_pieces,
    write_tekken,
    write_tiktoken,
)

from argosy.models import BUNDLED_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = {"vocab_size": 4104, "max_position_embeddings": 1024, "intermediate_size": 128}


def write_model(path: Path, family: str, options: dict[str, Any]) -> Reference:
    """Write a tiny model with the tokenizer and the chat template of the bundled model."""
    reference = make_reference(path, family, SIZES | options, model=MODELS.get(family, ""))
    for name in TOKENIZER_FILES:
        shutil.copy(BUNDLED_MODEL / name, path)
    return reference


def family(name: str, **options: Any) -> Callable[[Path], object]:  # noqa: ANN401
    return lambda path: write_model(path, name, options)


def quantized(name: str) -> Callable[[Path], object]:
    return lambda path: quantize_checkpoint(write_model(path, "Qwen2", {}), FORMATS[name])


def mxfp4(path: Path) -> None:
    name, options = FAMILIES["gpt-oss"]
    quantize_experts_to_mxfp4(write_model(path, name, options))


def torch_archive(path: Path) -> None:
    write_model(path, "Llama", {})
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def with_tokenizer(write: Callable[[Path], object], vocab_size: int) -> Callable[[Path], object]:
    """Write a model whose tokenizer comes in one file, as `write` writes it, and whose chat template does not."""

    def apply(path: Path) -> None:
        make_reference(path, "Mistral", SIZES | {"vocab_size": vocab_size})
        write(path)

    return apply


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "own family": (family("Qwen3", head_dim=32), "implementation=argosy"),
    "model of transformers": (family("Granite"), "implementation=transformers"),
    "latent attention": (
        lambda path: write_model(path, *FAMILIES["deepseek 3"]),
        "implementation=argosy",
    ),
    "recurrent layers": (
        lambda path: write_model(path, *FAMILIES["qwen 3.5"]),
        "recurrent_states_allocated",
    ),
    "GPTQ": (quantized("gptq act-order"), "gptq, 4 bits"),
    "AWQ": (quantized("awq"), "awq"),
    "compressed-tensors": (quantized("compressed int4"), "compressed-tensors"),
    "FP8": (quantized("fp8 block"), "fp8"),
    "nf4": (quantized("nf4 nested"), "bitsandbytes"),
    "MXFP4": (mxfp4, "mxfp4"),
    "pytorch_model.bin": (torch_archive, "stored_format=plain"),
    "SentencePiece": (
        with_tokenizer(
            lambda path: (path / "tokenizer.model").write_bytes(sentencepiece_model()),
            len(sentencepiece_pieces()),
        ),
        "implementation=argosy",
    ),
    "tiktoken": (
        with_tokenizer(lambda path: write_tiktoken(path / "tokenizer.model"), 512),
        "implementation=argosy",
    ),
    "GGUF": (lambda path: export(BUNDLED_MODEL, path), "implementation=argosy"),
    "tekken": (
        with_tokenizer(lambda path: write_tekken(path / "tekken.json"), 512),
        "implementation=argosy",
    ),
}


def read_stream(server: ServeProcess, *, chat: bool) -> str:
    with server.client() as client:
        model = client.models.list().data[0].id
        options: Any = {"model": model, "stream": True, "temperature": 0, "seed": 1}
        if not chat:
            chunks = client.completions.create(prompt="hello world", max_tokens=12, **options)
            return "".join(chunk.choices[0].text for chunk in chunks)
        options["messages"] = [{"role": "user", "content": "Tell me a story about a cat."}]
        events = client.chat.completions.create(max_tokens=40, **options)
        return "".join(event.choices[0].delta.content or "" for event in events)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_directory_of_each_kind_streams(tmp_path: Path, kind: str) -> None:
    """The name of the directory is that of the model, and the log says how it is computed."""
    write, logged = KINDS[kind]
    path = tmp_path / "my-model"
    write(path)
    with run_serve(str(path), "--log-level", "info") as server, server.client() as client:
        assert [card.id for card in client.models.list()] == ["my-model"]
        has_template = path.is_file() or (path / "chat_template.jinja").exists()
        assert read_stream(server, chat=has_template)
        assert any(logged in line for line in server.stderr_lines)
