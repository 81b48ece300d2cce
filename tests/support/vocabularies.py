"""Small tokenizers of the two types that checkpoints have, and a checkpoint directory with one of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from argosy.engine.serving.text import Tokenizer

LINES = [
    "hello world, the cat sat on the mat",
    "Grüße aus München, 你好世界, 你好 👋🏽",
    'a list: {"one": 1, "two": 2}\n\nUser: stop here\n',
    "the the the stop stop END END of the answer",
]
BYTE_LEVEL_SPECIAL = ["<|begin|>", "<|user|>", "<|end|>"]


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a byte-level BPE, the type of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=BYTE_LEVEL_SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 4, trainer)
    backend.add_tokens(["<palabra añadida>", "é√"])
    return backend


@cache
def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Return a BPE with byte fallback and a leading space, the type of Llama 2, Mistral and Phi-3."""
    special_tokens = ["<unk>", "<s>", "</s>"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyzETUS,.:", "ü"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("s", "t"), ("o", "p"), ("st", "op")]
    pieces = [*special_tokens, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(special_tokens)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return backend


def byte_level() -> Tokenizer:
    """Return a tokenizer with the byte-level backend."""
    backend = byte_level_backend()
    return Tokenizer(backend, [backend.get_vocab()["<|end|>"]])


def sentencepiece() -> Tokenizer:
    """Return a tokenizer with the SentencePiece backend."""
    backend = sentencepiece_backend()
    return Tokenizer(backend, [backend.get_vocab()["</s>"]])


TEMPLATE = (
    "{% for message in messages %}"
    "<|user|>{{ message.role }}: {{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)


def write_checkpoint(path: Path) -> Path:
    """Write a checkpoint without weights, with its chat template in tokenizer_config.json. Return `path`."""
    byte_level_backend().save(str(path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<|begin|>", "special": True},
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
