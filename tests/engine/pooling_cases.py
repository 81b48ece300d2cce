"""Tiny random models that sentence-transformers saved, and what it computes with them.

Functions import the library, because it takes seconds and every test worker collects this module.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers, processors
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece

from tests.engine.transformers_reference import make_reference

with warnings.catch_warnings(action="ignore"):
    import transformers

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ("yes", "no", ".", ",", ":", "?", "<", ">", "|", "query", "document", "system")
VOCABULARY = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
ENCODER = {"num_key_value_heads": None, "type_vocab_size": 2, "hidden_act": "gelu"}
ROBERTA = ENCODER | {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 258}
MODERN = {"num_hidden_layers": 4, "local_attention": 6, "global_attn_every_n_layers": 3}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": True,
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}system : {{ message['content'] }} "
    "{% elif message['role'] == 'query' %}query : {{ message['content'] }} "
    "{% elif message['role'] == 'document' %}document : {{ message['content'] }} {% endif %}{% endfor %}? yes no ."
)
"""Template of a reranker, which renders a pair and ends with a fixed text."""
TEXTS = [
    "the quick brown fox",
    "",
    "a",
    "jumps over, the lazy dog. and then: it sleeps?",
    "lorem ipsum dolor sit amet " * 4,
    "the quick brown cat",
]
PAIRS = [(TEXTS[0], TEXTS[3]), (TEXTS[5], TEXTS[4]), (TEXTS[0], "b"), ("x y", TEXTS[0])]


@dataclass(frozen=True)
class PoolingCase:
    """Model and layout."""

    family: str
    """Start of the names of configuration and model in transformers."""
    options: dict[str, Any]
    model: str
    """Class of the model in transformers."""
    post_processor: str
    """Special tokens that the tokenizer adds: `bert`, `roberta`, or `last` for one at the end."""
    modes: tuple[str, ...] = ("mean",)
    dense: tuple[int, ...] = ()
    is_normalized: bool = False
    includes_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    max_tokens: int = 64


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
EMBEDDERS = {
    "bert, mean": PoolingCase("Bert", ENCODER, "BertModel", "bert", is_normalized=True),
    "bert, all modes": PoolingCase("Bert", ENCODER, "BertModel", "bert", MODES),
    "xlm-roberta, cls": PoolingCase(
        "XLMRoberta", ROBERTA, "XLMRobertaModel", "roberta", ("cls",), is_normalized=True
    ),
    "modernbert, cls, dense": PoolingCase(
        "ModernBert", MODERN, "ModernBertModel", "bert", ("cls",), dense=(48,)
    ),
    "bert, prompt excluded": PoolingCase(
        "Bert",
        ENCODER,
        "BertModel",
        "bert",
        MODES,
        includes_prompt=False,
        prompts={"query": "query: ", "document": "document: "},
    ),
    "qwen 3, last token": PoolingCase(
        "Qwen3",
        {"head_dim": 16},
        "Qwen3Model",
        "last",
        ("lasttoken",),
        is_normalized=True,
        prompts={"query": "query: "},
    ),
    "mistral, last token": PoolingCase(
        "Mistral", {"sliding_window": 8}, "MistralModel", "last", ("lasttoken",)
    ),
    "qwen 2, mean": PoolingCase("Qwen2", {}, "Qwen2Model", "last", ("mean", "weightedmean")),
    "gemma 3, both directions": PoolingCase(
        "Gemma3Text", GEMMA, "Gemma3TextModel", "last", dense=(96, 32), is_normalized=True
    ),
}
CLASSIFIERS = {
    "bert, 1 label": PoolingCase(
        "Bert", ENCODER | {"num_labels": 1}, "BertForSequenceClassification", "bert"
    ),
    "xlm-roberta, 1 label": PoolingCase(
        "XLMRoberta", ROBERTA | {"num_labels": 1}, "XLMRobertaForSequenceClassification", "roberta"
    ),
    "modernbert, 1 label": PoolingCase(
        "ModernBert",
        MODERN | {"num_labels": 1, "classifier_pooling": "mean"},
        "ModernBertForSequenceClassification",
        "bert",
    ),
    "qwen 3, 1 label": PoolingCase(
        "Qwen3", {"head_dim": 16, "num_labels": 1}, "Qwen3ForSequenceClassification", "last"
    ),
}


def save_transformer(path: Path, case: PoolingCase) -> Any:  # noqa: ANN401 - of transformers
    """Save the random transformer of a case with its tokenizer, and return the model."""
    reference = make_reference(path, case.family, case.options, model=case.model)
    build_tokenizer(case).save_pretrained(path)
    return reference.model


def save_embedder(path: Path, case: PoolingCase) -> SentenceTransformer:
    """Save an embedding model in the layout of sentence-transformers, and load it with the library."""
    with warnings.catch_warnings(action="ignore"):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.base.modules import Dense, Normalize, Transformer
        from sentence_transformers.sentence_transformer.modules import Pooling

    save_transformer(path / "transformer", case)
    transformer = Transformer(
        str(path / "transformer"), model_kwargs={"attn_implementation": "eager"}
    )
    width = transformer.get_embedding_dimension()
    modules: list[Any] = [
        transformer,
        Pooling(width, case.modes, include_prompt=case.includes_prompt),
    ]
    width *= len(case.modes)
    torch.manual_seed(3)
    for size in case.dense:
        modules.append(Dense(width, size, bias=size != 96, activation_function=torch.nn.Tanh()))
        width = size
    if case.is_normalized:
        modules.append(Normalize())
    model = SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts=case.prompts,
        default_prompt_name=next(iter(case.prompts), None),
    )
    model.max_seq_length = case.max_tokens
    model.save(str(path / "saved"), create_model_card=False)
    return model.eval()


def save_classifier(path: Path, case: PoolingCase) -> CrossEncoder:
    """Save a classifier as transformers does, and load it with sentence-transformers."""
    with warnings.catch_warnings(action="ignore"):
        from sentence_transformers import CrossEncoder

    save_transformer(path / "saved", case)
    model: CrossEncoder = CrossEncoder(str(path / "saved"), device="cpu")
    return model


def save_reranker(path: Path) -> CrossEncoder:
    """Save a language model whose score is the difference of two logits."""
    with warnings.catch_warnings(action="ignore"):
        from sentence_transformers import CrossEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.cross_encoder.modules import LogitScore

    case = PoolingCase("Qwen3", {"head_dim": 16}, "Qwen3ForCausalLM", "last")
    save_transformer(path / "transformer", case)
    tokenizer = build_tokenizer(case)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path / "transformer")
    transformer = Transformer(str(path / "transformer"), transformer_task="text-generation")
    true_id, false_id = map(VOCABULARY.index, ("yes", "no"))
    model: CrossEncoder = CrossEncoder(
        modules=[transformer, LogitScore(true_id, false_id)],
        device="cpu",
        prompts={"query": "find the answer"},
        default_prompt_name="query",
    )
    model.save(str(path / "saved"))
    return model


def build_tokenizer(case: PoolingCase) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of letters and a few words with the special tokens of a case."""
    ids = {text: index for index, text in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = WordPieceDecoder()
    templates = {
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
        "last": ("$A [SEP]", "$A $B [SEP]"),
    }
    single, pair = templates[case.post_processor]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(text, ids[text]) for text in SPECIALS]
    )
    # only this class states that its model has token types
    kind = (
        transformers.BertTokenizer
        if case.family == "Bert"
        else transformers.PreTrainedTokenizerFast
    )
    return kind(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=case.max_tokens,
    )
