"""Loader of a checkpoint's tokenizer from any of the files that models come with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from argosy.engine.serving.text.byte_level_bpe import (
    KIMI_PATTERN,
    LLAMA_3_PATTERN,
    QWEN_2_PATTERN,
    SpecialToken,
    build_byte_level,
    build_from_ranks,
    parse_tiktoken,
    split_as_gpt2,
    split_by,
)
from argosy.engine.serving.text.checkpoint_files import read_json_object, read_special_tokens
from argosy.engine.serving.text.sentencepiece_model import (
    build_sentencepiece,
    parse_sentencepiece,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_TIKTOKEN_PATTERNS = {"TikTokenTokenizer": KIMI_PATTERN, "QWenTokenizer": QWEN_2_PATTERN}
"""Pattern of each tokenizer class whose code has it. Others have that of Llama 3."""
_QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(205)),
)
_TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""First special tokens of Tekken files that do not list them."""
_MAX_SPECIALS = 100_000


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """Load the tokenizer of the checkpoint directory `path`.

    Raises:
        ValueError: The directory has none, or it cannot be read. The message names the file and the remedy.
    """
    loaders: tuple[tuple[str, Callable[[Path], tokenizers.Tokenizer]], ...] = (
        ("tokenizer.json", _load_definition),
        ("tekken.json", _load_tekken),
        ("tokenizer.model", _load_model),
        ("*.tiktoken", _load_tiktoken),
        ("tiktoken.model", _load_tiktoken),
        ("merges.txt", _load_merges),
    )
    for pattern, load in loaders:
        for file in filter(Path.is_file, sorted(path.glob(pattern))):  # no pipes or devices
            try:
                return load(file)
            except Exception as error:  # the library raises its base class
                raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    raise ValueError(
        f"{path} has no tokenizer.json, and no tekken.json, tokenizer.model, *.tiktoken or merges.txt; write one with "
        "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _load_definition(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(file.read_bytes())  # names of files may be no text


def _load_model(file: Path) -> tokenizers.Tokenizer:
    """Load a `tokenizer.model`, which is a SentencePiece model, or a file of tiktoken as of Llama 3."""
    data = file.read_bytes()
    if _is_tiktoken(data):
        return _load_tiktoken(file)
    model = parse_sentencepiece(data)
    config = read_json_object(file.parent / "tokenizer_config.json")
    specials = _find_specials(file.parent)
    known = {piece.text for piece in model.pieces}
    if isinstance(config.get("add_prefix_space"), bool):
        model.adds_prefix_space = config["add_prefix_space"]
    bos = None
    if config.get("add_bos_token", not model.is_unigram):
        pieces = {piece.text: index for index, piece in enumerate(model.pieces)}
        bos = _find_bos(file.parent, pieces)
    return build_sentencepiece(
        model,
        [special for special in specials if special.text not in known],
        bos,
        prefix_after_specials=config.get("legacy") is not False,
    )


def _is_tiktoken(data: bytes) -> bool:
    first, _, _ = data.partition(b"\n")
    try:
        return bool(parse_tiktoken(first))
    except ValueError:
        return False


def _load_tiktoken(file: Path) -> tokenizers.Tokenizer:
    ranks = parse_tiktoken(file.read_bytes())
    config = read_json_object(file.parent / "tokenizer_config.json")
    kind = str(config.get("tokenizer_class"))
    specials = _find_specials(file.parent)
    if kind == "QWenTokenizer" and not specials:
        specials = [
            SpecialToken(text, len(ranks) + index) for index, text in enumerate(_QWEN_SPECIALS)
        ]
    bos = None
    if config.get("add_bos_token"):
        bos = _find_bos(file.parent, {each.text: each.token_id for each in specials})
    pattern = _TIKTOKEN_PATTERNS.get(kind, LLAMA_3_PATTERN)
    return build_from_ranks(ranks, split_by(pattern), specials, bos)


def _load_tekken(file: Path) -> tokenizers.Tokenizer:
    definition = read_json_object(file)
    config = definition["config"]
    num_specials = int(config["default_num_special_tokens"])
    num_tokens = int(config["default_vocab_size"]) - num_specials
    if not 0 < num_specials <= _MAX_SPECIALS:
        raise ValueError(f"default_num_special_tokens is {num_specials}")
    ranks = {
        msgspec.convert(entry["token_bytes"], bytes, strict=False): int(entry["rank"])
        + num_specials
        for entry in definition["vocab"][:num_tokens]
    }
    names = dict(enumerate(_TEKKEN_SPECIALS))
    if definition.get("special_tokens"):
        names = {int(each["rank"]): str(each["token_str"]) for each in definition["special_tokens"]}
    specials = [
        SpecialToken(names.get(index, f"<SPECIAL_{index}>"), index) for index in range(num_specials)
    ]
    bos = next((each for each in specials if each.text == "<s>"), None)
    return build_from_ranks(ranks, split_by(str(config["pattern"])), specials, bos)


def _load_merges(file: Path) -> tokenizers.Tokenizer:
    """Load `vocab.json` and `merges.txt` of GPT-2's tokenizer."""
    vocabulary = msgspec.json.decode((file.parent / "vocab.json").read_bytes(), type=dict[str, int])
    lines = file.read_text("utf-8").splitlines()
    pairs = []
    for line in lines[1:] if lines and lines[0].startswith("#version") else lines:
        left, _, right = line.partition(" ")
        if right:
            pairs.append((left, right))
    known = set(vocabulary)
    specials = [each for each in _find_specials(file.parent) if each.text not in known]
    named = [
        SpecialToken(text, vocabulary[text])
        for text in dict.fromkeys(read_special_tokens(file.parent).values())
        if text in known
    ]
    return build_byte_level(vocabulary, pairs, split_as_gpt2(), [*specials, *named])


def _find_specials(folder: Path) -> list[SpecialToken]:
    """Return the added tokens that a checkpoint's files list with their ids, by id.

    Raises:
        ValueError: An entry is damaged.
    """
    found: dict[int, SpecialToken] = {}
    for text, token_id in read_json_object(folder / "added_tokens.json").items():
        found[int(token_id)] = SpecialToken(text, int(token_id))
    decoder: Any = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for key, token in (decoder or {}).items():
        found[int(key)] = SpecialToken(
            str(token["content"]), int(key), is_special=bool(token.get("special", True))
        )
    if any(token_id < 0 for token_id in found) or len(found) > _MAX_SPECIALS:
        raise ValueError("added tokens have impossible ids")
    return [found[token_id] for token_id in sorted(found)]


def _find_bos(folder: Path, ids: dict[str, int]) -> SpecialToken | None:
    """Return the token that starts each text, if the vocabulary has it."""
    text = read_special_tokens(folder).get("bos_token", "<s>")
    return SpecialToken(text, ids[text]) if text in ids else None
