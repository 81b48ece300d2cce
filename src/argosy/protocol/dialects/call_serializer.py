"""Order in which each tool call of a chat is whole, for dialects whose clients expect one item after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from argosy.protocol.dialects.dialect_output import CallKind, DialectOutput

_Action = Callable[[], None]


class CallSerializer:
    """Passes a chat's output on to a builder, one tool call after the other.

    A server may send the deltas of parallel calls in any order. What follows a call waits until its arguments are a
    whole JSON object, or until the end if it is a custom tool's, whose input may be any text.

    Args:
        output: The builder.
    """

    def __init__(self, output: DialectOutput) -> None:
        self.output = output
        self._open_call: int | None = None
        """Index of the call that receives its text directly, None for text."""
        self._waiting: list[tuple[int | None, _Action]] = []
        """Output that follows the open call, by the index of its call."""
        self._arguments: dict[int, list[str]] = {}
        """Parts of each function's arguments so far."""

    def add_reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        self._add(None, partial(self.output.add_reasoning, text))

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        """Add text of the answer."""
        self._add(None, partial(self.output.add_text, text, logprobs))

    def start_call(self, index: int, call_id: str, name: str, kind: CallKind) -> None:
        """Start the tool call with this index."""
        if kind == "function":
            self._arguments[index] = []
        self._add(index, partial(self.output.start_call, call_id, name, kind))

    def add_call_text(self, index: int, text: str) -> None:
        """Add text of a call's arguments, or of a custom tool's input."""
        if index in self._arguments:
            self._arguments[index].append(text)
        self._add(index, partial(self.output.add_call_text, text))

    def release_all(self) -> None:
        """Pass on all that waits, since nothing will follow."""
        self._release(is_end=True)

    def _add(self, owner: int | None, action: _Action) -> None:
        is_open = owner == self._open_call or self._open_call is None
        if is_open:
            self._open_call = owner
            action()
        else:
            self._waiting.append((owner, action))
        # The open call may be complete now, or what arrives first after it asks whether it is.
        if self._waiting and (is_open or len(self._waiting) == 1) and self._is_complete():
            self._release()

    def _release(self, *, is_end: bool = False) -> None:
        """Pass on what waits, until a call that may be incomplete is the open one."""
        while self._waiting:
            self._open_call = owner = self._waiting[0][0]
            for other, action in self._waiting:
                if other == owner:
                    action()
            self._waiting = [entry for entry in self._waiting if entry[0] != owner]
            if not is_end and not self._is_complete():
                return

    def _is_complete(self) -> bool:
        """Return whether the open call cannot receive more text."""
        if self._open_call is None:
            return True
        parts = self._arguments.get(self._open_call)
        if not parts or not parts[-1].rstrip().endswith("}"):
            return False
        try:
            return isinstance(msgspec.json.decode("".join(parts)), dict)
        except (msgspec.DecodeError, RecursionError):
            return False
