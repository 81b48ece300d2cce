"""Tokenizer: encoding, and decoding by concatenation of bytes, for both types of vocabularies."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import (
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
    write_checkpoint,
)
from tokenizers import Regex, decoders, models, pre_tokenizers

from argosy.engine.serving.text.gguf_text import KNOWN_PATTERNS
from argosy.engine.serving.text.tokenizer import Tokenizer

TOKENIZERS = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
BACKENDS = {"byte_level": byte_level_backend(), "sentencepiece": sentencepiece_backend()}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["the cat", " the", "你好 👋🏽", "a\n\n b", "<palabra añadida>é√", "the<|end|>cat"]
)


@pytest.fixture(params=TOKENIZERS)
def tokenizer_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@given(text=TEXT, name=st.sampled_from(sorted(TOKENIZERS)))
def test_decode_agrees_with_the_library(text: str, name: str) -> None:
    ids = TOKENIZERS[name].encode(text)
    for skip in (True, False):
        expected = BACKENDS[name].decode(ids, skip_special_tokens=skip)
        assert TOKENIZERS[name].decode(ids, skip_special_tokens=skip) == expected


@given(data=st.data())
def test_any_byte_level_ids_decode_as_in_the_library(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS["byte_level"].vocab_size - 1), max_size=30))
    assert TOKENIZERS["byte_level"].decode(ids) == BACKENDS["byte_level"].decode(ids)


@given(text=TEXT)
def test_token_bytes_concatenate_to_the_text(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_every_byte_has_its_own_token(tokenizer_type: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_type]
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_sentencepiece_token_bytes_and_text() -> None:
    tokenizer, ids = TOKENIZERS["sentencepiece"], BACKENDS["sentencepiece"].get_vocab()
    assert tokenizer.token_bytes(ids["<0x0A>"]) == b"\n"
    assert tokenizer.token_bytes(ids["▁the"]) == b" the"
    assert tokenizer.token_text(ids["<0xE4>"]) == "�"
    assert tokenizer.token_text(ids["</s>"]) == "</s>"


def test_sentencepiece_drops_the_leading_space_only_in_whole_texts() -> None:
    tokenizer, the = TOKENIZERS["sentencepiece"], BACKENDS["sentencepiece"].get_vocab()["▁the"]
    assert tokenizer.decode([the, the]) == "the the"
    token_bytes = tokenizer.token_decoder(skip_special_tokens=True)
    assert b"".join(map(token_bytes, [the, the])) == b" the the"


def test_metaspace_decoder_agrees_with_the_library() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, "s"))
    backend.decoder = decoders.Metaspace()
    ids = [0, 1, 2]
    assert Tokenizer(backend).decode(ids) == backend.decode(ids) == "the cats"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer_type: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_type]
    assert tokenizer.decode([-1, tokenizer.vocab_size, 10**30]) == ""
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_lone_surrogate_is_a_value_error(tokenizer_type: str) -> None:
    with pytest.raises(ValueError, match="Unicode"):
        TOKENIZERS[tokenizer_type].encode("a\ud800")


def test_longest_token_bounds_the_characters_of_a_text(tokenizer_type: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_type]
    text = "hello world, stop stop the 你好世界"
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_chars


def test_concurrent_threads_encode_alike(tokenizer_type: str) -> None:
    texts = [f"the cat {i} sat on the mat 你好" for i in range(64)]
    expected = [TOKENIZERS[tokenizer_type].encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(TOKENIZERS[tokenizer_type].encode, texts)) == expected


def test_encoding_releases_the_gil(tokenizer_type: str) -> None:
    """Another thread writes streams. It would stop for as long as the encoding of a long prompt takes."""
    text = "the cat sat on the mat 你好 " * 20_000
    started, ended = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        TOKENIZERS[tokenizer_type].encode(text)
        ended.set()

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(600)  # threads only switch if one releases the GIL
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        started.wait()
        was_interleaved = not ended.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(switch_interval)
    assert was_interleaved


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path: Path) -> None:
    """Also in a folder whose name is no text, as names with umlauts are where the locale is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xfc")
    folder.mkdir()
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    (folder / "tokenizer.json").write_text(backend.to_str())
    text = "hello world, the cat sat on the mat"
    assert Tokenizer.load(folder).encode(text) == TOKENIZERS["byte_level"].encode(text)


@pytest.mark.parametrize(
    ("file", "value", "expected_tokens"),
    [
        ("generation_config.json", {"eos_token_id": [1, 0]}, ["<|begin|>", "<|user|>", "<|end|>"]),
        ("generation_config.json", {"eos_token_id": 1}, ["<|user|>", "<|end|>"]),
        ("config.json", {"text_config": {"eos_token_id": 0}}, ["<|begin|>", "<|end|>"]),
        ("config.json", {"eos_token_id": None}, ["<|end|>"]),
    ],
)
def test_eos_ids_are_collected_from_all_files(
    tmp_path: Path, file: str, value: dict[str, object], expected_tokens: list[str]
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / file).write_text(json.dumps(value))
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == expected_tokens


def declared(content: str, **flags: bool) -> dict[str, object]:
    """Return an entry of `added_tokens_decoder`."""
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


NEXT_ID = byte_level_backend().get_vocab_size(with_added_tokens=True)
DECLARED_TOKENS: dict[str, dict[str, dict[str, object]]] = {
    "in added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(NEXT_ID + 1): declared("<|tool_result|>", lstrip=True),
                str(NEXT_ID): declared("<|assistant|>", special=True),
            }
        }
    },
    "with other flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(NEXT_ID - 1): declared("é√", special=True, rstrip=True)}
        }
    },
    "by name": {
        "tokenizer_config.json": {
            "pad_token": "<|assistant|>",
            "unk_token": "the",
            "additional_special_tokens": ["<|tool_result|>", "<|end|>"],
            "image_token": "<image>",
        }
    },
    "in the files of older checkpoints": {
        "added_tokens.json": {"<|assistant|>": NEXT_ID, "<|tool_result|>": NEXT_ID + 1},
        "special_tokens_map.json": {
            "pad_token": {"content": "<|assistant|>", "lstrip": False, "rstrip": False}
        },
    },
}


@pytest.mark.parametrize("where", DECLARED_TOKENS)
def test_tokens_that_only_other_files_declare_are_read_as_in_transformers(
    tmp_path: Path, where: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>"}))
    for file, values in DECLARED_TOKENS[where].items():
        path = tmp_path / file
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | values))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "<|user|>the <|assistant|> é√ cat <|tool_result|><|end|> <image>the"
    ids = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.vocab_size == len(reference)


def test_declared_token_without_embedding_stays_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    before = Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": before.vocab_size}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[PAD]": before.vocab_size}))
    with structlog.testing.capture_logs() as logs:
        tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("[PAD]") == before.encode("[PAD]")
    assert [(entry["event"], entry["tokens"]) for entry in logs] == [
        ("declared_tokens_not_embedded", ["[PAD]"])
    ]


DECLARED = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            DECLARED,
            {"added_tokens_decoder": {str(NEXT_ID + 5): declared("<|assistant|>")}},
            rf"tokenizer_config\.json.*'<\|assistant\|>'.*{NEXT_ID + 5}.*{NEXT_ID}",
        ),
        *(
            (DECLARED, {"added_tokens_decoder": entries}, r"tokenizer_config\.json.*added_tokens")
            for entries in list[object]([3, {"x": {}}, {"5": {"content": 3}}, {"5": "a"}])
        ),
        (
            "config.json",
            {"text_config": {"vocab_size": 200}},
            r"the tokenizer of.*vocab_size.*200",
        ),
        ("config.json", {"eos_token_id": [10**30], "text_config": {}}, "eos_token_id is 10"),
        *(
            ("tokenizer.json", content, r"tokenizer\.json")
            for content in ("", "{", "[]", '{"model": 3}')
        ),
        ("tokenizer.json", None, "save_pretrained"),
    ],
    ids=str,
)
def test_file_that_cannot_be_used_is_named(
    tmp_path: Path, file: str, content: object, message: str
) -> None:
    """Content is None for a missing file."""
    write_checkpoint(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def split(pattern: str) -> dict[str, object]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": step}


def replace(*contents: str) -> dict[str, object]:
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": each} for each in contents]
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (split(r"(a+)+\x00"), r"the pattern '\(a\+\).*fails for some texts .*retry-limit"),
        (split(r"\s+$"), "the pattern .* takes more than 1 s of CPU time"),
        (replace("b" * 1000), "makes texts up to 1000 times as long"),
        (replace("aaaa", "aaaa"), "makes texts up to 16 times as long"),
        (replace(*"b" * 100), "the normalizer has 101 steps"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 100}}, "Prepend of the normalizer has a prepend of 100"),
        ({"model.end_of_word_suffix": "x" * 100}, "model BPE .* end_of_word_suffix of 100 characters"),
        ({"model.vocab.the": 5000}, "has the id 5000, but vocab_size"),
    ],
    ids=["exponential", "quadratic", "long", "sequence", "steps", "prepend", "suffix", "vocabulary"],
)  # fmt: skip
def test_tokenizer_that_takes_or_makes_too_much_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 4000}')
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text())
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = definition
        for section in sections:
            target = target[section]
        target[key] = value
    file.write_text(json.dumps(definition))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_pattern_that_fails_for_one_text_fails_its_request_only() -> None:
    backend = copy.deepcopy(byte_level_backend())  # others share it
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("qzj(x+x+)+y"), "isolated")
    tokenizer = Tokenizer(backend)
    assert not tokenizer.has_known_patterns
    assert TOKENIZERS["byte_level"].has_known_patterns
    assert tokenizer.encode("the cat")
    with pytest.raises(ValueError, match="fails on the text"):
        tokenizer.encode("qzj" + "x" * 60 + "z y")


@pytest.mark.exhaustive
@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_known_patterns_take_linear_time(pattern: str) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-m", "argosy.engine.serving.pattern_process"],
        input=pattern.encode(),
        check=False,
    )
    assert process.returncode == 0


@pytest.mark.parametrize(
    "decoder",
    [decoders.BPEDecoder(), decoders.CTC(), decoders.Sequence([decoders.Strip(" ", 1, 1)])],
)
def test_decoder_without_concatenation_is_rejected(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    backend.decoder = decoder
    with pytest.raises(ValueError, match="not supported"):
        Tokenizer(backend)
