"""Builder of byte-level BPE tokenizers from the ranks of tiktoken files, tekken.json, merges.txt and GGUF files."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_PATTERN = LLAMA_3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN_35_PATTERN = QWEN_2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHER_CHARACTERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_PATTERN = _CASED_WORDS.replace("SUFFIX", "") + r"|\p{N}" + _OTHER_CHARACTERS
GPT_4O_PATTERN = _CASED_WORDS.replace("SUFFIX", _CONTRACTION) + r"|\p{N}{1,3}" + _OTHER_CHARACTERS
KIMI_PATTERN = (
    r"[\p{Han}]+|"
    + _CASED_WORDS.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("SUFFIX", _CONTRACTION)
    + r"|\p{N}{1,3}"
    + _OTHER_CHARACTERS.replace("/", "")
)

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = iter(range(0x100, 0x200))
BYTE_ALPHABET = [chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(0x100)]
"""Printable character by which GPT-2's alphabet spells each byte."""
MAX_TOKEN_BYTES = 1024
"""Length of a token up to which its merges are searched. The search takes the square of it."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """Token that is encoded as a whole wherever its text occurs."""

    text: str
    token_id: int
    is_special: bool = True
    """Whether `skip_special_tokens` leaves it out of the text."""


def parse_tiktoken(data: bytes) -> dict[bytes, int]:
    """Parse lines of a token in base64 and its rank.

    Raises:
        ValueError: A line is something else.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    return ranks


def build_from_ranks(
    ranks: Mapping[bytes, int],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    specials: Sequence[SpecialToken],
    bos: SpecialToken | None = None,
) -> Tokenizer:
    """Build a tokenizer that merges the neighbours whose result has the lowest rank.

    Args:
        ranks: Rank of each token, which is also its id.
        pre_tokenizer: Splits a text into words in the byte-level alphabet.
        specials: Special tokens.
        bos: Token that starts each text.

    Raises:
        ValueError: A byte has no token, two tokens have the same id, or a token is too long.
    """
    longest = max(map(len, ranks), default=0)
    if longest > MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {longest} bytes")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"there is no token for the byte {missing[0]}")
    merges: list[tuple[int, int, int]] = []
    for token, rank in ranks.items():
        for middle in range(1, len(token)):
            left, right = ranks.get(token[:middle]), ranks.get(token[middle:])
            if left is not None and right is not None:
                merges.append((rank, left, right))
    texts = {
        rank: "".join([BYTE_ALPHABET[byte] for byte in token]) for token, rank in ranks.items()
    }
    pairs = [(texts[left], texts[right]) for _, left, right in sorted(merges)]
    vocabulary = {text: rank for rank, text in texts.items()}
    return build_byte_level(vocabulary, pairs, pre_tokenizer, specials, bos, ignore_merges=True)


def build_byte_level(
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    specials: Sequence[SpecialToken],
    bos: SpecialToken | None = None,
    *,
    ignore_merges: bool = False,
) -> Tokenizer:
    """Build a tokenizer of tokens in the byte-level alphabet.

    Raises:
        ValueError: Two tokens have the same id, or a merge does not give a token.
    """
    vocabulary = vocabulary | {special.text: special.token_id for special in specials}
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError("two tokens have the same id")
    try:
        tokenizer = Tokenizer(
            BPE(vocabulary, list(merges), fuse_unk=False, ignore_merges=ignore_merges)
        )
    except Exception as error:  # the library raises its base class
        raise ValueError(f"the merges do not fit the vocabulary ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, specials)
    set_bos(tokenizer, bos)
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer, specials: Iterable[SpecialToken]) -> None:
    """Make tokens of the vocabulary special."""
    for special in specials:
        added = AddedToken(special.text, normalized=False, special=special.is_special)
        (tokenizer.add_special_tokens if special.is_special else tokenizer.add_tokens)([added])


def set_bos(tokenizer: Tokenizer, bos: SpecialToken | None) -> None:
    """Let each encoded text start with a token."""
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos.text} $A", special_tokens=[(bos.text, bos.token_id)]
        )


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that isolates the matches of each pattern in turn."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def split_as_gpt2(*, single_digits: bool = False) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of GPT-2, which may isolate each digit first."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not single_digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
