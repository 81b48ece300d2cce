"""Truncation of conversations: which of the oldest messages are dropped until the rest fits the context.

System messages, the last message of the user and the last message stay. A call and its results stay or go together. The
rest begins with a message of the user, as most chat templates require.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from argosy.engine.serving.text.message_forms import SYSTEM_ROLES
from argosy.policy import format_ranges
from argosy.protocol import ChatMessageParam

Prompt = TypeVar("Prompt")
_RESULT_ROLES = ("tool", "function")


def truncate_messages(
    messages: Sequence[ChatMessageParam],
    build_prompt: Callable[[list[ChatMessageParam]], Prompt | None],
) -> tuple[Prompt, tuple[str, ...]] | None:
    """Drop the fewest of the oldest messages with which a prompt fits.

    Work: one prompt for each doubling of the number of messages, and two more.

    Args:
        messages: The conversation.
        build_prompt: Returns the prompt of messages; None if it is too long.

    Returns:
        The prompt, and the ranges of the dropped messages (`messages[1:7]`); None if no rest fits.
    """
    units = _list_droppable(messages)
    cuts = _list_cuts(messages, units)

    def drop(cut: int) -> set[int]:
        return {index for unit in units[:cut] for index in unit}

    def build(cut: int) -> Prompt | None:
        dropped = drop(cut)
        return build_prompt(
            [message for index, message in enumerate(messages) if index not in dropped]
        )

    low, high, found = 0, len(cuts), None
    while low < high:
        middle = (low + high) // 2
        prompt = build(cuts[middle])
        if prompt is None:
            low = middle + 1
        else:
            high, found = middle, prompt
    return None if found is None else (found, format_ranges(sorted(drop(cuts[high]))))


def count_chars(messages: Sequence[ChatMessageParam]) -> int:
    """Return the number of characters in the texts of messages, which every template renders."""
    return sum(
        len(message.content)
        if isinstance(message.content, str)
        else sum(len(part.text or "") for part in message.content or ())
        for message in messages
    )


def _list_droppable(messages: Sequence[ChatMessageParam]) -> list[list[int]]:
    """Return the indexes of the messages that may be dropped, oldest first, grouped by calls with their results."""
    units: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role in _RESULT_ROLES and units and units[-1][-1] == index - 1:
            units[-1].append(index)
        elif message.role not in SYSTEM_ROLES:
            units.append([index])
    last_question = max(
        (index for index, message in enumerate(messages) if message.role == "user"), default=-1
    )
    return [unit for unit in units[:-1] if unit[0] != last_question]


def _list_cuts(messages: Sequence[ChatMessageParam], units: Sequence[list[int]]) -> list[int]:
    """Return how many units may be dropped, so that the rest begins with a message of the user if it has one."""
    droppable = {index for unit in units for index in unit}
    kept = [
        index
        for index, message in enumerate(messages)
        if index not in droppable and message.role not in SYSTEM_ROLES
    ]
    has_question = any(messages[index].role == "user" for index in kept)
    firsts = [min(kept[0], unit[0]) for unit in units[1:]] + kept[:1]
    return [
        cut
        for cut, first in enumerate(firsts[: len(units)], 1)
        if messages[first].role == "user" or not has_question
    ]
