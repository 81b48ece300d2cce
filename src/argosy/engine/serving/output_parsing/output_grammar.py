"""Grammar of a whole output: free text, tool calls and a constrained answer, in the format of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from argosy.constraints import OutputConstraint, Relaxation, Tool, ToolChoiceMode, ToolRequest
from argosy.engine.serving.output_parsing import harmony
from argosy.engine.serving.output_parsing.call_grammar import (
    CallGrammar,
    add_arguments,
    build_call_grammar,
)
from argosy.engine.serving.output_parsing.grammar_writer import (
    GrammarWriter,
    alternatives,
)
from argosy.engine.serving.output_parsing.harmony import HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax
from argosy.engine.serving.output_parsing.output_format import AnswerFrame, OutputFormat
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

_LEADING_SPACE = r"/[ \n]{1,2}/"


class OutputGrammar(NamedTuple):
    """Grammar of an output behind its reasoning block."""

    text: str
    """Text for `SamplingParams.grammar`. Empty if nothing is constrained."""
    relaxations: tuple[tuple[str, Relaxation], ...] = ()
    """Request field and keyword of each part of a tool's schema that is not enforced."""


def build_output_grammar(
    output_format: OutputFormat,
    request: ToolRequest,
    answer: OutputConstraint | None,
    marker_id: Callable[[str], int | None],
) -> OutputGrammar:
    """Return the grammar of an output behind its reasoning block.

    Args:
        output_format: Format of the model.
        request: Tools of the request. `auto` allows text and calls, `required` and `named` demand calls, `none`
            forbids them.
        answer: Constraint of the answer if there is no call.
        marker_id: Id of a marker that is a special token of the model, or None.

    Raises:
        ApiError: 400 if a strict tool cannot be enforced.
    """
    ids = {text: marker_id(text) for text in output_format.tokens}
    writer = GrammarWriter({text: token for text, token in ids.items() if token is not None})
    mode, callable_tools = request.choice.mode, request.callable_tools
    parallel = request.parallel and mode != "named"
    if isinstance(output_format.syntax, HarmonySyntax):
        text = _harmony_grammar(writer, callable_tools, mode, answer)
        return OutputGrammar(text, tuple(writer.relaxations))
    grammar = None
    allows_text = mode == "auto" and answer is None
    if callable_tools:
        grammar = build_call_grammar(
            writer, output_format.syntax, callable_tools, allows_text=allows_text
        )
    if grammar is None:
        return OutputGrammar(_answer_grammar(writer, output_format, answer))
    space = writer.shared_rule("SPACE", _LEADING_SPACE) + "?"
    thinking = _text_thinking(writer, output_format)
    if allows_text:
        start = _free_text(writer, output_format, grammar, parallel=parallel)
    else:
        start = f"{space} {grammar.calls(writer.literal(grammar.opener), parallel=parallel)}"
        if output_format.frame is not None:
            frame = output_format.frame
            start = (
                f"({writer.literal(frame.open)})? {writer.literal(frame.close)} {start} "
                f"({writer.literal(frame.end)})?"
            )
        if mode == "auto" and answer is not None:
            start = f"{start} | {_framed_answer(writer, output_format.frame, answer)}"
        start = f"{thinking} ({start})" if thinking else start
    return OutputGrammar(writer.encode(start), tuple(dict.fromkeys(writer.relaxations)))


def _answer_grammar(
    writer: GrammarWriter, output_format: OutputFormat, answer: OutputConstraint | None
) -> str:
    """Return the grammar of an answer without calls."""
    if answer is None:
        return ""
    thinking = _text_thinking(writer, output_format)
    if output_format.frame is None and not thinking:
        return answer.grammar_text
    return writer.encode(f"{thinking} {_framed_answer(writer, output_format.frame, answer)}")


def _text_thinking(writer: GrammarWriter, output_format: OutputFormat) -> str:
    """Return an expression for a reasoning block that may begin with ordinary text, or an empty string.

    A block that begins with a special token is no part of the grammar, because the engine recognises it.
    """
    opener, closer = output_format.reasoning_open, output_format.reasoning_close
    if not opener or writer.is_token(opener):
        return ""
    space = writer.shared_rule("SPACE", _LEADING_SPACE)
    return f"({writer.literal(opener)} {writer.text_until(closer)} {space}?)?"


def _framed_answer(
    writer: GrammarWriter, frame: AnswerFrame | None, answer: OutputConstraint
) -> str:
    """Return an expression for a constrained answer and the markers around it."""
    text = writer.add_grammars(answer.grammars)
    if frame is None:
        return text
    return (
        f"({writer.literal(frame.open)})? {text} {writer.literal(frame.close)} "
        f"({writer.literal(frame.end)})?"
    )


def _free_text(
    writer: GrammarWriter, output_format: OutputFormat, grammar: CallGrammar, *, parallel: bool
) -> str:
    """Return an expression for text in which calls may occur. A call begins with the first trigger."""
    if grammar.bare is not None:
        return grammar.bare_output(grammar.bare, parallel=parallel)
    first, *rest = writer.split(grammar.opener)
    unwanted: list[str] = list(_bare_triggers(output_format, writer))
    if writer.is_token(first):
        head = f"{writer.text(unwanted)} {writer.literal(grammar.opener)}"
    elif rest:
        head = f"{writer.text_with(first)} {writer.literal(''.join(rest))}"
    else:
        head = writer.text_up_to(first)
        unwanted.append(first)
    calls = grammar.calls(head, parallel=parallel)
    text = writer.text(unwanted)
    if output_format.frame is not None:
        frame = output_format.frame
        calls = grammar.calls(writer.literal(grammar.opener), parallel=parallel)
        closed = f"{writer.text_until(frame.close)} ({calls})? ({writer.literal(frame.end)})?"
        return f"({writer.literal(frame.open)})? ({text} | {closed})"
    return f"({calls})* {text}" if parallel else f"{calls} | {text}"


def _bare_triggers(output_format: OutputFormat, writer: GrammarWriter) -> Sequence[str]:
    """Return further texts with which a call would begin."""
    syntax = output_format.syntax
    if isinstance(syntax, TagSyntax) and syntax.has_bare_calls:
        return (syntax.name_open,)
    if isinstance(syntax, JsonSyntax):
        return [text for text in syntax.open[1:] if text and not writer.is_token(text)]
    return ()


def _harmony_grammar(
    writer: GrammarWriter,
    tools: Sequence[Tool],
    mode: ToolChoiceMode,
    answer: OutputConstraint | None,
) -> str:
    """Return the grammar of messages. The prompt has opened the first one, and its channel follows."""
    if not tools and answer is None:
        return ""
    literal = writer.literal
    text = writer.text()
    next_message = f"{harmony.END}{harmony.START}assistant"
    channels = ["analysis"]
    if mode == "auto" and answer is None:
        channels.append("commentary")
    messages = alternatives(
        [
            f"{literal(f'{harmony.CHANNEL}{channel}{harmony.MESSAGE}')} {writer.text_until(next_message)}"
            for channel in channels
        ]
    )
    last = []
    if tools:
        content_type = f'(" "? {literal(harmony.CONSTRAIN)} "json" | " json")?'
        message = literal(harmony.MESSAGE)
        calls = [
            f"({literal(f' to=functions.{tool.name}{harmony.CHANNEL}commentary')} | "
            f"{literal(f'{harmony.CHANNEL}commentary to=functions.{tool.name}')}) "
            f"{content_type} {message} {reference}"
            for tool, reference in add_arguments(writer, tools)
        ]
        last.append(writer.rule("call", alternatives(calls)))
    if mode in ("auto", "none"):
        body = text if answer is None else writer.add_grammars(answer.grammars)
        last.append(f"{literal(f'{harmony.CHANNEL}final{harmony.MESSAGE}')} {body}")
        if "commentary" in channels:
            last.append(f"{literal(f'{harmony.CHANNEL}commentary{harmony.MESSAGE}')} {text}")
    return writer.encode(f"({messages})* {alternatives(last)}")
