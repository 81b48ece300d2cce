"""Training of the byte-level BPE tokenizer, and its export with the chat template in Hugging Face layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from models.chat_format import (
    ADDED_SPECIALS,
    ASSISTANT,
    BASE_SPECIALS,
    BASE_VOCABULARY,
    BEGIN,
    END,
    MAX_LENGTH,
    PAD,
    SPECIALS,
    SYSTEM,
    TEMPLATE,
    TEXT_MARKERS,
    TOOL,
    TOOLS,
    USER,
)
from models.corpus.chat import generate_documents

_TURN_MARKERS = [SYSTEM, USER, ASSISTANT, TOOLS, TOOL]


def sample(seed: int, count: int) -> Iterator[str]:
    """Yield the texts that the vocabulary is trained on."""
    for document in islice(generate_documents(seed), count):
        yield from (turn.content for turn in document.messages)
        if document.prose:
            yield document.prose


def build(seed: int, count: int) -> Tokenizer:
    """Train the tokenizer. Every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCABULARY,
        special_tokens=list(BASE_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(seed, count), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    add_specials(tokenizer)
    return tokenizer


def add_specials(tokenizer: Tokenizer) -> None:
    """Append the tokens of tools and reasoning to the vocabulary."""
    for text in ADDED_SPECIALS:
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=text not in TEXT_MARKERS)])


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and its configuration files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": text not in TEXT_MARKERS,
        }
        for text in SPECIALS
    }  # fmt: skip
    config = {
        **named,
        "added_tokens_decoder": added,
        "additional_special_tokens": _TURN_MARKERS,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    extra = {**named, "additional_special_tokens": _TURN_MARKERS}
    _dump(folder / "tokenizer_config.json", config)
    _dump(folder / "special_tokens_map.json", extra)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train on the first documents of the stream or extend a tokenizer, and write the files to the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument(
        "--extend", type=Path, help="folder whose tokenizer gets only the missing special tokens"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60_000)
    options = parser.parse_args()
    if options.extend:
        tokenizer = Tokenizer.from_file(str(options.extend / "tokenizer.json"))
        add_specials(tokenizer)
    else:
        tokenizer = build(options.seed, options.count)
    for folder in options.folders:
        write(tokenizer, folder)


if __name__ == "__main__":
    main()
