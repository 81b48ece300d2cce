"""Tokenizers from other files than tokenizer.json: the same ids as the libraries that define the formats."""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.utils import sentencepiece_model_pb2_new

from argosy.engine.serving.text.byte_level_bpe import (
    KIMI_PATTERN,
    LLAMA_3_PATTERN,
    QWEN_2_PATTERN,
    TEKKEN_PATTERN,
)
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.checkpoint_files import read_special_tokens
from argosy.engine.serving.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SPACE = "\u2581"
TEXTS = [
    "",
    "hello world",
    "  It's 12345 o'clock,\n\n\tisn't it?  ",
    "HTTPServer getURL 数字是三 مرحبا 1234567",
    "naïve café — “quotes” 🙂🙃",
    "def f(x):\n    return x ** 2  # comment\r\n",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "it is what it is, isn't it"] * 4


def spell(token: bytes) -> str:
    """Spell bytes in the alphabet of byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in token
    )


def train(vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


@cache
def ranks() -> dict[bytes, int]:
    """Ranks of a byte-level BPE, of which the bytes come first, as in tiktoken's own files."""
    byte_by_character = {spell(bytes([byte])): byte for byte in range(256)}
    learnt: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
    for text, _ in sorted(train(400).get_vocab().items(), key=lambda item: item[1]):
        learnt.setdefault(bytes(byte_by_character[each] for each in text), len(learnt))
    return learnt


def write_tiktoken(file: Path) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    file.write_text("\n".join(lines))


def assert_ids_equal(tokenizer: Tokenizer, reference: tiktoken.Encoding, bos: list[int]) -> None:
    texts = [*TEXTS, *(t * 2 for t in TEXTS), "<|im_start|>user\nhi<|im_end|>"]
    for text in texts:
        expected = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == bos + expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("file", "kind", "pattern"),
    [
        ("tokenizer.model", "PreTrainedTokenizerFast", LLAMA_3_PATTERN),
        ("qwen.tiktoken", "OtherTokenizer", LLAMA_3_PATTERN),
        ("tiktoken.model", "TikTokenTokenizer", KIMI_PATTERN),
    ],
)
def test_tiktoken_file_gives_ids_of_tiktoken(
    tmp_path: Path, file: str, kind: str, pattern: str
) -> None:
    write_tiktoken(tmp_path / file)
    specials = {"<|im_start|>": 500, "<|im_end|>": 501, "<s>": 502}
    entries = {str(i): {"content": text, "special": True} for text, i in specials.items()}
    config: dict[str, Any] = {
        "tokenizer_class": kind,
        "added_tokens_decoder": entries,
        "eos_token": "<|im_end|>",
    }
    config |= {"bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    reference = tiktoken.Encoding(
        "t", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=specials
    )
    assert_ids_equal(tokenizer, reference, [502])
    assert tokenizer.eos_token_ids == [501]
    assert tokenizer.special_ids == frozenset(specials.values())


def write_tekken(file: Path) -> None:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks().items()
    ]
    unused = {"rank": len(vocabulary), "token_bytes": "enp6enp6", "token_str": None}
    config = {"pattern": TEKKEN_PATTERN, "default_num_special_tokens": 30, "version": "v3"}
    config["default_vocab_size"] = 30 + len(vocabulary)
    file.write_text(json.dumps({"config": config, "vocab": [*vocabulary, unused]}))


def test_tekken_file_gives_ids_of_its_pattern(tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json")
    tokenizer = Tokenizer.load(tmp_path)
    shifted = {token: rank + 30 for token, rank in ranks().items()}
    reference = tiktoken.Encoding(
        "t", pat_str=TEKKEN_PATTERN, mergeable_ranks=shifted, special_tokens={"[INST]": 3}
    )
    assert_ids_equal(tokenizer, reference, [1])
    assert tokenizer.encode("[INST]hi", add_special_tokens=False)[0] == 3
    assert tokenizer.vocab_size == 30 + len(ranks())


def test_vocabulary_and_merges_give_ids_of_gpt_2(tmp_path: Path) -> None:
    reference = train(350)
    reference.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": 350}))
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|end|>")[-1] == 350


# --- SentencePiece -------------------------------------------------------------------------------


def sentencepiece_pieces() -> list[tuple[str, float, int]]:
    """Pieces with scores and types: specials, bytes, characters and random merges of them."""
    generator = random.Random(3)
    characters = sorted({*"".join(TEXTS[1:4]).replace(" ", SPACE), SPACE} - {"\n", "\t"})
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<tool>", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    learnt = set(characters)
    words = [f"{SPACE}{word}" for text in TEXTS[1:] for word in text.split()]
    order: list[str] = []
    while len(order) < 90:
        word = generator.choice(words)
        start = generator.randrange(len(word))
        for end in range(start + 2, min(start + 7, len(word)) + 1):
            token = word[start:end]
            if token not in learnt and token[:-1] in learnt and token[-1] in learnt:
                learnt.add(token)
                order.append(token)
    pieces += [(token, -float(rank), 1) for rank, token in enumerate(order)]
    return pieces + [(each, -1000.0 - i, 1) for i, each in enumerate(characters)]


def sentencepiece_model(*, prefix: bool = True) -> bytes:
    model: Any = sentencepiece_model_pb2_new.ModelProto()
    for text, score, kind in sentencepiece_pieces():
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    content: bytes = model.SerializeToString()
    return content


def merge_by_score(text: str, pieces: list[tuple[str, float, int]]) -> list[int]:
    """Encode as SentencePiece's BPE does: merge the neighbours with the best score until none can be merged."""
    ids = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == 1}
    symbols = list(text.replace(" ", SPACE))
    while True:
        best = max(
            (
                (scores[a + b], -index)
                for index, (a, b) in enumerate(pairwise(symbols))
                if a + b in scores
            ),
            default=None,
        )
        if best is None:
            break
        index = -best[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    encoded: list[int] = []
    for symbol in symbols:
        known = symbol in scores
        encoded += [ids[symbol]] if known else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return encoded


def assert_ids_are_defined(tokenizer: Tokenizer, space: str, texts: list[str]) -> None:
    pieces = sentencepiece_pieces()
    assert tokenizer.vocab_size == len(pieces)
    assert tokenizer.eos_token_ids == [2]
    for text in texts:
        expected = merge_by_score(space + text, pieces)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("legacy", [None, False])
def test_sentencepiece_bpe_gives_ids_of_its_definition(
    tmp_path: Path, prefix: bool, legacy: bool | None
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(prefix=prefix))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    space = " " if prefix else ""
    # Unless legacy, transformers adds no second space before a text that begins with one.
    texts = [text for text in TEXTS[1:] if legacy is None or not text.startswith(" ")]
    assert_ids_are_defined(tokenizer, space, texts)
    after = merge_by_score((space if legacy is None else "") + "is it", sentencepiece_pieces())
    assert tokenizer.encode("<tool>is it", add_special_tokens=False) == [3, *after]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pieces"),
        (b"\xff" * 40, "damaged"),
        (b"version https://example/spec\noid sha256:abc\nsize 499723\n", "damaged"),
        (b"\x0a\xff\xff\xff\xff\x7f", "damaged"),
        (sentencepiece_model()[:-60] + b"\x0a\x7f", "damaged"),
        (b"YWI= 0\n", "no token for the byte 0"),
        (b"YWI= 0\nnonsense\n", "line 2 is not a token"),
    ],
    ids=["empty", "noise", "LFS pointer", "huge length", "truncated", "few ranks", "bad line"],
)
def test_damaged_model_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.model cannot be read .*{message}"):
        Tokenizer.load(tmp_path)


def test_word_piece_decoder_is_that_of_the_library(tmp_path: Path) -> None:
    tokens = ["[UNK]", "hello", "##ing", "play", "it", "'", "s", ".", ",", "do", "not", "##ly"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for cleanup in (True, False):
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.load(tmp_path)
        for ids in ([1], [3, 2, 4, 5, 6, 7], [9, 10, 3, 11, 8, 1, 7], [4, 7, 7]):
            assert tokenizer.decode(ids) == backend.decode(ids)


# --- GGUF ----------------------------------------------------------------------------------------


def write_gguf_tokenizer(
    file: Path, kind: str, tokens: list[bytes], types: list[int], **values: object
) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("pre", "pattern", "adds_bos"),
    [("qwen2", QWEN_2_PATTERN, False), ("llama-bpe", LLAMA_3_PATTERN, True)],
)
def test_byte_level_tokenizer_of_gguf_gives_ids_of_tiktoken(
    tmp_path: Path, pre: str, pattern: str, adds_bos: bool
) -> None:
    file = tmp_path / "model.gguf"
    specials = {"<|im_start|>": len(ranks()), "<|im_end|>": len(ranks()) + 1}
    tokens = [spell(token).encode() for token in ranks()] + [text.encode() for text in specials]
    merges = [
        f"{spell(token[:middle])} {spell(token[middle:])}"
        for token in ranks()
        for middle in range(1, len(token))
        if token[:middle] in ranks() and token[middle:] in ranks()
    ]
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    write_gguf_tokenizer(
        file,
        "gpt2",
        tokens,
        [1] * len(ranks()) + [3, 3],
        token_merges=merges,
        tokenizer_pre=pre,
        bos_token_id=specials["<|im_start|>"],
        eos_token_id=5,
        chat_template=template,
    )
    tokenizer = Tokenizer.load(file)
    reference = tiktoken.Encoding(
        "t", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=specials
    )
    assert_ids_equal(tokenizer, reference, [specials["<|im_start|>"]] if adds_bos else [])
    assert tokenizer.eos_token_ids == [5, specials["<|im_end|>"]]
    assert set(read_special_tokens(file)) == {"bos_token", "eos_token"}
    rendered = ChatTemplate.load(file).render([{"role": "user", "content": "hi"}])
    assert rendered == f"<|im_start|>hi{spell(bytes([5]))}"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_of_gguf_gives_ids_of_its_definition(
    tmp_path: Path, prefix: bool
) -> None:
    file = tmp_path / "model.gguf"
    pieces = sentencepiece_pieces()
    write_gguf_tokenizer(
        file,
        "llama",
        [text.encode() for text, _, _ in pieces],
        [kind for _, _, kind in pieces],
        token_scores=[score for _, score, _ in pieces],
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=prefix,
    )
    assert_ids_are_defined(Tokenizer.load(file), " " if prefix else "", TEXTS[1:])
    assert ChatTemplate.load(file).source is None


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bert", {}, "tokenizer.ggml.model is 'bert'"),
        ("gpt2", {"tokenizer_pre": "unheard-of"}, "pre is 'unheard-of', which is not known"),
        ("gpt2", {"tokenizer_pre": "qwen2"}, "merges is missing"),
        ("gpt2", {"tokenizer_pre": "qwen2", "token_merges": ["a z"]}, "merges do not fit"),
        ("llama", {}, "scores does not fit"),
        ("llama", {"token_scores": [0.0, 1.0], "bos_token_id": 7}, "bos_token_id is 7"),
    ],
)
def test_gguf_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, kind: str, values: dict[str, Any], message: str
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf_tokenizer(file, kind, [b"a", b"b"], [1, 1], **values)
    with pytest.raises(ValueError, match=rf"tokenizer of .*model\.gguf .*{message}.*safetensors"):
        Tokenizer.load(file)
