"""Training of the byte-level BPE tokenizer, and its export with the chat template in Hugging Face layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.corpus.chat import Document, generate_documents

BEGIN, SYSTEM, USER, ASSISTANT, END, PAD = SPECIALS = (
    "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>",
)  # fmt: skip
VOCABULARY = 4096
MAX_LENGTH = 2048
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] in ['system', 'developer'] %}
{{- '<|system|>' + message['content'] | trim + '<|end|>' }}
{%- elif message['role'] == 'user' %}
{{- '<|user|>' + message['content'] | trim + '<|end|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>' + message['content'] | trim + '<|end|>' }}
{%- else %}
{{- raise_exception('The roles are system, user and assistant; got: ' + message['role']) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def render(document: Document) -> str:
    """Return the text of a document in the format of the chat template."""
    if not document.messages:
        return f"{BEGIN}{document.prose}{END}"
    turns = (f"{_ROLES[turn.role]}{turn.content}{END}" for turn in document.messages)
    return BEGIN + "".join(turns)


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
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(seed, count), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and its configuration files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True,
        }
        for text in SPECIALS
    }  # fmt: skip
    config = {
        **named,
        "added_tokens_decoder": added,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    extra = {**named, "additional_special_tokens": [SYSTEM, USER, ASSISTANT]}
    _dump(folder / "tokenizer_config.json", config)
    _dump(folder / "special_tokens_map.json", extra)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train on the first documents of the stream, and write the files to the given folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60_000)
    options = parser.parse_args()
    tokenizer = build(options.seed, options.count)
    for folder in options.folders:
        write(tokenizer, folder)


if __name__ == "__main__":
    main()
