"""Pooling requests and models: what a request asks for, and what a model that computes vectors can do."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "token_embed", "classify", "score"]
"""Embedding of a text or of each of its tokens, probabilities of labels, and relevance of a document to a query."""
ModelTask = Literal["auto", "generate", "embed", "score"]
"""Task of a model. `auto` follows from the layout of the checkpoint."""
PoolingActivation = Literal["identity", "sigmoid", "softmax", "tanh"]
"""Function from the outputs of a classification head to scores or probabilities."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Similarity of two embeddings. The distances are negated."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Parameters of one sequence that is pooled to a vector instead of continued."""

    reads_all_tokens: bool
    """Whether the result needs every token computed, so that no cached prefix is used."""
    first_token: int = 0
    """Tokens before this position, those of a prompt, are left out of the pooling."""
    second_text_start: int | None = None
    """Position of the first token of the second text of a pair, for models that distinguish both texts."""
    is_token_level: bool = False
    """Whether the result has a vector for each token."""


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Properties of a model that computes vectors."""

    tasks: tuple[PoolingTask, ...]
    output_size: int
    """Elements of an embedding, or number of labels."""
    max_input_tokens: int
    """Maximum tokens of a text, or of a pair of texts, special tokens included."""
    labels: tuple[str, ...] | None = None
    """Names of the labels of a classifier, in the order of the outputs."""
    prompts: dict[str, str] = {}
    """Prompts that are put before texts, by name."""
    default_prompt_name: str | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    """Sizes to which embeddings may be truncated, if the checkpoint states them."""
    is_normalized: bool = False
    """Whether embeddings have length 1 by default."""
    activation: PoolingActivation = "identity"
    """Activation that scores and probabilities have by default."""
    similarity: Similarity = "cosine"
    """Similarity of embeddings that the model was trained for."""
    reads_all_tokens: bool = True
    """Whether the result needs the hidden states of all tokens, and not only of the last one."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt take part in the pooling."""
    is_lowercased: bool = False
    """Whether texts are converted to lower case before they are tokenized."""
    renders_pairs: bool = False
    """Whether a chat template renders the two texts of a pair, as for rerankers that are language models."""
