"""Special tokens of the vocabulary, the chat template, and the text of a document in the template's format."""

from __future__ import annotations

import json
from pathlib import Path

from models.corpus.documents import Document, Message, ToolCall

BEGIN, SYSTEM, USER, ASSISTANT, END, PAD = BASE_SPECIALS = (
    "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>",
)  # fmt: skip
"""The first tokens of the vocabulary."""
THINK, THINK_END, CALL, CALL_END, TOOLS, TOOL, RESERVED_0, RESERVED_1 = ADDED_SPECIALS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|tools|>", "<|tool|>", "<|reserved_0|>", "<|reserved_1|>",
)  # fmt: skip
"""The last tokens of the vocabulary. The reserved ones make its size a multiple of 8."""
SPECIALS = BASE_SPECIALS + ADDED_SPECIALS
TEXT_MARKERS = (THINK, THINK_END, CALL, CALL_END)
"""Added tokens that are part of an answer, so that decoding keeps them."""
BASE_VOCABULARY = 4096
VOCABULARY = BASE_VOCABULARY + len(ADDED_SPECIALS)
MAX_LENGTH = 8192
TEMPLATE = (Path(__file__).resolve().parent / "chat_template.jinja").read_text(encoding="utf-8")
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


def token_id(text: str) -> int:
    """Return the id of a special token."""
    if text in BASE_SPECIALS:
        return BASE_SPECIALS.index(text)
    return BASE_VOCABULARY + ADDED_SPECIALS.index(text)


def render_call(call: ToolCall) -> str:
    """Return the text of a call."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'{CALL}\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n{CALL_END}'


def render_message(message: Message) -> str:
    """Return the text of a turn."""
    reasoning = f"{THINK}\n{message.reasoning}\n{THINK_END}\n\n" if message.reasoning else ""
    parts = [message.content] if message.content else []
    body = "\n".join([*parts, *map(render_call, message.calls)])
    return f"{_ROLES[message.role]}{reasoning}{body}{END}"


def render(document: Document) -> str:
    """Return the text of a document in the format of the chat template."""
    if not document.messages:
        return f"{BEGIN}{document.prose}{END}"
    messages = document.messages
    text = BEGIN
    if document.tools:
        system = messages[0].content if messages[0].role == "system" else ""
        messages = messages[1:] if messages[0].role == "system" else messages
        lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in document.tools)
        text += f"{SYSTEM}{system}{TOOLS}{lines}{END}"
    return text + "".join(map(render_message, messages))
