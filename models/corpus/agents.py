"""Conversations with tools: single calls, parallel calls, chains, answers from results, requests without a tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from models.corpus.documents import Document, Message, ToolCall
from models.corpus.noise import punctuate
from models.corpus.parameters import TRAINING, Lexicon
from models.corpus.patterns import Exchange, capitalise, expand
from models.corpus.systems import draw_rule, plain_rule
from models.corpus.tools import Request, Tool, draw_error, draw_tools, generate_tool
from models.corpus.values import VALUES

NO_TOOL = "I am sorry, I have no tool for that."
_ROLES = (
    "[You are a helpful assistant.|You are an agent.|You are a helpful agent with tools.|You are an AI agent.]",
    "[You are an assistant that can use tools.|You are a helpful assistant.|You are an agent.]",
)
_RULES = (
    "",
    "[Use the tools when they help.|Call a tool if one fits.|Use the tools to answer.|You can call tools.]",
    "[Answer the user with the tools.|Always use your tools if one of them fits.]",
)
_LEADS = (
    "Please", "Hi,", "Can you", "Could you", "Now", "Then", "Hello!", "Ok,", "I want you to",
)  # fmt: skip


# --- answers from results -------------------------------------------------------------------------


def say_value(value: object) -> str:
    """Return a value of a result in words."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(say_value(item) for item in value) if value else "none"
        case dict():
            return ", ".join(
                f"{key.replace('_', ' ')} {say_value(item)}" for key, item in value.items()
            )
        case _:
            return str(value)


def answer_result(result: object) -> str:
    """Return the answer of the assistant after a result."""
    match result:
        case dict() if "error" in result:
            return f"Sorry, that did not work: {result['error']}."
        case str() if result.startswith("Error: "):
            return f"Sorry, that did not work: {result.removeprefix('Error: ')}."
        case dict():
            rest = {key: value for key, value in result.items() if key != "status"}
            facts = [
                f"the {key.replace('_', ' ')} is {say_value(value)}" for key, value in rest.items()
            ]
            if not facts:
                return "Done."
            text = (
                capitalise(", ".join(facts[:-1]) + (" and " if len(facts) > 1 else "") + facts[-1])
                + "."
            )
            return f"Done. {text}" if "status" in result else text
        case list():
            return f"I found {len(result)}: {'; '.join(map(say_value, result))}."
        case str() if result.strip(".").lower() in {"ok", "done", "sent", "success", "delivered"}:
            return "Done."
        case _:
            return f"The result is {say_value(result).rstrip('.')}."


def dump_result(result: object, rng: Random) -> str:
    """Return the content of a tool turn."""
    return (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=rng.random() < 0.5)
    )


# --- turns ------------------------------------------------------------------------------------------


def explain_call(tool: Tool, call: ToolCall) -> str:
    """Return the reasoning before a call: what the user wants, the tool that fits, and its arguments."""
    text = f"The user wants to {tool.action}. The tool {tool.name} fits."
    if call.arguments:
        listed = [
            f"{name} is {json.dumps(value, ensure_ascii=False)}"
            for name, value in call.arguments.items()
        ]
        text += (
            f" {capitalise(', '.join(listed))}."
            if len(listed) < 4
            else f" It needs {len(listed)} arguments."
        )
    return text


def vary_request(request: Request, rng: Random) -> str:
    """Return the request in one of several ways to type it, without a change of its values."""
    text = punctuate(request.text, rng)
    draw = rng.random()
    if draw < 0.15:
        text = text[:1].lower() + text[1:]
    elif draw < 0.22:
        text = f"{rng.choice(_LEADS)} {text[:1].lower()}{text[1:]}"
    return text


def single_turn(tools: list[Tool], rng: Random) -> list[Message]:
    """Return a request, the call, its result and the answer."""
    tool = rng.choice(tools)
    request = tool.request(rng)
    call = ToolCall(tool.name, request.arguments)
    reasoning = explain_call(tool, call)
    turn = [
        Message("user", vary_request(request, rng)),
        Message("assistant", "", (call,), reasoning),
    ]
    if rng.random() < 0.6:
        return turn  # the next turn of the user follows at once; the call is what counts
    result = draw_error(rng, tool) if rng.random() < 0.08 else tool.result(rng, call.arguments)
    if result is None:
        result = "ok"
    return [
        *turn,
        Message("tool", dump_result(result, rng)),
        Message(
            "assistant", answer_result(result), (), "The tool gave a result. I say it in words."
        ),
    ]


def parallel_turn(tools: list[Tool], rng: Random) -> list[Message]:
    """Return a request for two or three things, parallel calls, and usually the results with an answer."""
    count = rng.choice((2, 2, 2, 3))
    with_arguments = [tool for tool in tools if tool.parameters]
    if with_arguments and (len(tools) < count or rng.random() < 0.5):
        tool = rng.choice(with_arguments)
        chosen = [tool] * count
    elif len(tools) >= count:
        chosen = rng.sample(tools, count)
    else:
        return single_turn(tools, rng)
    requests = [tool.request(rng) for tool in chosen]
    calls = tuple(
        ToolCall(tool.name, request.arguments)
        for tool, request in zip(chosen, requests, strict=True)
    )
    texts = [request.text for request in requests]
    joint = rng.choice((" and ", ". ", ", and ", " and also ", "; ", ". Also "))
    text = joint.join(
        [texts[0], *(t if "." in joint else t[:1].lower() + t[1:] for t in texts[1:])]
    )
    first = chosen[0]
    if all(tool is first for tool in chosen) and len(first.parameters) == 1 and rng.random() < 0.7:
        parameter = first.parameters[0]
        if parameter.kind not in {
            "things",
            "people",
            "numbers",
            "object",
            "items",
            "boolean",
            "expression",
        }:
            values = [
                VALUES[parameter.kind](rng) if parameter.kind in VALUES else parameter.draw(rng)
                for _ in calls
            ]
            base = first.request(rng)
            while parameter.name not in base.arguments:
                base = first.request(rng)
            plain = str(base.arguments[parameter.name])
            if base.text.count(plain) == 1:
                listed = ", ".join(v.text for v in values[:-1]) + " and " + values[-1].text
                if values[0].text.startswith(("'", '"')):
                    base_text = base.text.replace(f'"{plain}"', plain).replace(f"'{plain}'", plain)
                else:
                    base_text = base.text
                text = base_text.replace(plain, listed)
                calls = tuple(
                    ToolCall(first.name, {parameter.name: value.json}) for value in values
                )
    reasoning = (
        f"The user wants {len(calls)} things. I call "
        + ", ".join(call.name for call in calls)
        + "."
    )
    turn = [Message("user", punctuate(text, rng)), Message("assistant", "", calls, reasoning)]
    if rng.random() < 0.6:
        return turn
    results = [tool.result(rng, call.arguments) for tool, call in zip(chosen, calls, strict=True)]
    answers = []
    for call, result in zip(calls, results, strict=True):
        label = next(
            (str(v) for v in call.arguments.values() if isinstance(v, str | int)), call.name
        )
        answers.append(f"{label}: {answer_result(result)}")
    turn += [Message("tool", dump_result(result, rng)) for result in results]
    return [
        *turn,
        Message(
            "assistant", "\n".join(answers), (), "The tools gave results. I say them in words."
        ),
    ]


def chain_turn(tools: list[Tool], rng: Random) -> list[Message]:
    """Return a request with two steps, where the second call comes after the result of the first."""
    if len(tools) < 2:
        return single_turn(tools, rng)
    first, second = rng.sample(tools, 2)
    one, two = first.request(rng), second.request(rng)
    joint = rng.choice((", then ", " and then ", ". After that, ", ", and then "))
    text = f"{one.text}{joint}{two.text[:1].lower()}{two.text[1:]}"
    result_one, result_two = first.result(rng, one.arguments), second.result(rng, two.arguments)
    calls = ToolCall(first.name, one.arguments), ToolCall(second.name, two.arguments)
    return [
        Message("user", punctuate(text, rng)),
        Message("assistant", "", (calls[0],), f"There are two steps. First I call {first.name}."),
        Message("tool", dump_result(result_one, rng)),
        Message("assistant", "", (calls[1],), f"The first step is done. Now I call {second.name}."),
        Message("tool", dump_result(result_two, rng)),
        Message("assistant", answer_result(result_two), (), "Both steps are done."),
    ]


def missing_turn(tools: list[Tool], rng: Random) -> list[Message]:
    """Return a request without a required argument. The assistant asks for it, and calls after the answer."""
    usable = [
        t
        for t in tools
        if len(t.parameters) == 1
        and t.parameters[0].required
        and t.parameters[0].kind != "boolean"
        and " the " in t.action
    ]
    if not usable:
        return single_turn(tools, rng)
    tool = rng.choice(usable)
    parameter = tool.parameters[0]
    value = parameter.draw(rng)
    call = ToolCall(tool.name, {parameter.name: value.json})
    return [
        Message("user", punctuate(capitalise(tool.action), rng)),
        Message(
            "assistant",
            f"Which {parameter.words} should I use?",
            (),
            f"The tool {tool.name} needs the {parameter.words}. I ask for it.",
        ),
        Message("user", punctuate(value.text, rng)),
        Message("assistant", "", (call,), explain_call(tool, call)),
    ]


def no_tool_turn(tools: list[Tool], rng: Random, lexicon: Lexicon = TRAINING) -> list[Message]:
    """Return a request for which no tool fits."""
    taken = frozenset().union(*(tool.topics for tool in tools))
    tool = generate_tool(rng, lexicon)
    while tool.topics & taken:
        tool = generate_tool(rng, lexicon)
    request = tool.request(rng)
    return [
        Message("user", vary_request(request, rng)),
        Message("assistant", NO_TOOL, (), f"The user wants to {tool.action}. No tool fits."),
    ]


Turn = Callable[[list[Tool], Random], list[Message]]
_TURNS: tuple[tuple[Turn, int], ...] = (
    (single_turn, 62), (parallel_turn, 13), (chain_turn, 5), (missing_turn, 5), (no_tool_turn, 7),
)  # fmt: skip


def draw_system(rng: Random) -> str:
    """Return a system prompt of an agent."""
    draw = rng.random()
    if draw < 0.5:
        return expand(f"{rng.choice(_ROLES)} {rng.choice(_RULES)}", rng)
    return draw_rule(rng).prompt if draw < 0.53 else plain_rule(rng).prompt


def draw_agent_document(
    rng: Random,
    count: int,
    turns: int,
    chat: Callable[[Random], Exchange],
    *,
    lexicon: Lexicon = TRAINING,
) -> Document:
    """Return a conversation with tools. `chat` draws questions that need no tool."""
    tools = draw_tools(rng, count, lexicon)
    messages = [Message("system", draw_system(rng))] if rng.random() < 0.6 else []
    for _ in range(turns):
        if rng.random() < 0.14:
            exchange = chat(rng)
            messages += [
                Message("user", exchange.user if exchange.exact else punctuate(exchange.user, rng)),
                Message("assistant", exchange.reply, (), "No tool is needed. I answer myself."),
            ]
            continue
        (turn,) = rng.choices([t for t, _ in _TURNS], [w for _, w in _TURNS])
        messages += turn(tools, rng)
    definitions = tuple(tool.definition for tool in tools)
    return Document(tuple(_drop_reasoning(messages, keep=rng.random() < 0.22)), tools=definitions)


def _drop_reasoning(messages: list[Message], *, keep: bool) -> list[Message]:
    """Remove the reasoning before the last user turn, as the chat template does, or everywhere."""
    last = max(index for index, message in enumerate(messages) if message.role == "user")
    return [
        message if keep and index > last else Message(message.role, message.content, message.calls)
        for index, message in enumerate(messages)
    ]
