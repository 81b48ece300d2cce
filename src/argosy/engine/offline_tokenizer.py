"""Tokenizer of a loaded model, with the methods of a Hugging Face tokenizer that offline programs use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from argosy.engine.offline_prompts import Conversation, to_plain
from argosy.engine.offline_request_processor import to_body
from argosy.engine.serving.preprocessing.request_processor import RequestProcessor
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import TokenizeRequest


class LLMTokenizer:
    """Tokenizer of a loaded model. Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer, processor: RequestProcessor | None = None) -> None:
        """Wrap a tokenizer. Without a `processor`, there are no conversations."""
        self._tokenizer = tokenizer
        self._processor = processor

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """The largest token id plus 1."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids of the tokens that end an output."""
        return self._tokenizer.eos_token_ids

    @property
    def eos_token_id(self) -> int | None:
        """Id of the first token that ends an output, or None if the checkpoint names none."""
        return next(iter(self.eos_token_ids), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Return the token ids of a text, which are those of the same text as a prompt."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:  # noqa: FBT001, FBT002 - same
        """Return the text of token ids."""
        plain = to_plain(token_ids)
        ids = [plain] if isinstance(plain, int) else plain
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[int]:
        """Return the token ids of a conversation. Further arguments are variables of the template.

        Raises:
            ApiError: The template cannot render the conversation.
            ValueError: The model generates no text.
        """
        if self._processor is None:
            raise ValueError("the model computes vectors and has no conversations; call encode")
        fields = {
            "messages": [dict(message) for message in conversation],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": variables or None,
        }
        return self._processor.tokenize(to_body(fields, TokenizeRequest)).token_ids
