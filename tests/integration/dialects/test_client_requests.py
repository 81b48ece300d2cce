"""Requests in the shapes of agents and frameworks are served, with nothing lost but what is named.

The shapes are reduced to one tool and texts of our own.

Recorded were Codex 0.171, Claude Code 2.1.332, opencode 1.18, Qwen Code 0.24, LangChain 1.7, LiteLLM 1.110,
LlamaIndex 0.14 and the AI SDK 6. Those of Open WebUI and Continue follow their documentation. The chats of LangChain,
LiteLLM and LlamaIndex have no field that those of opencode and the AI SDK lack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM, QUESTION = "You are a careful agent.", "What is in the folder?"
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "Command to run."}},
    "required": ["command"],
    "additionalProperties": False,
}
SHELL: dict[str, Any] = {"name": "shell", "description": "Run a command.", "parameters": SCHEMA}
LARK = 'start: "*** Begin Patch" LF (/[-+ ].*/ LF)+ "*** End Patch" LF?\n%import common.LF'
PATCH = {"type": "grammar", "syntax": "lark", "definition": LARK}
ARGUMENTS, RESULT = '{"command": "ls"}', "README.md"


@dataclass(frozen=True)
class ClientRequest:
    """Request of a client, and what the gateway says about it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    in_prompt: tuple[str, ...] = (QUESTION,)
    """Texts that reach the model."""
    not_in_prompt: tuple[str, ...] = ()


def text_block(text: str, **fields: object) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def message_item(role: str, *texts: str, number: int = 0) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}


def codex(*items: dict[str, Any]) -> ClientRequest:
    """Return a request of Codex with further items in its input."""
    nested = {"type": "function", "strict": False, **SHELL, "name": "close_agent"}
    session = "01a21a3c-0000-7000-8000-000000000000"
    body = {
        "model": MODEL,
        "stream": True,
        "input": [
            message_item("developer", SYSTEM),
            message_item("developer", "<skills/>", "<permissions/>", number=1),
            message_item("user", "<environment_context/>", number=2),
            message_item("user", QUESTION, number=3),
            *items,
        ],
        "tools": [
            {"type": "function", "strict": False, **SHELL},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Apply a patch.",
                "format": PATCH,
            },
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [nested]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": session,
        "client_metadata": {"session_id": session, "x-codex-turn-metadata": "{}"},
    }
    headers = {
        "accept": "text/event-stream",
        "originator": "codex_exec",
        "session-id": session,
        "thread-id": session,
        "x-client-request-id": session,
        "x-codex-turn-metadata": "{}",
    }
    results = (RESULT,) if items else ()
    return ClientRequest("/v1/responses", body, headers, ("tools[3]",), (QUESTION, *results))


def claude_code(*messages: dict[str, Any]) -> ClientRequest:
    """Return a request of Claude Code with further messages."""
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "Bash", "description": "Run a command.", "input_schema": SCHEMA}
    user = {"role": "user", "content": [text_block("<system-reminder/>"), text_block(QUESTION)]}
    reminder = {"role": "system", "content": [text_block("# Environment", **cached)]}
    body = {
        "model": "claude-of-this-fleet",
        "messages": [user, reminder, *messages],
        "system": [
            text_block("x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"),
            text_block(SYSTEM, **cached),
        ],
        "tools": [tool, {**tool, "name": "Placeholder", "defer_loading": True}],
        "metadata": {"user_id": "{}"},
        "max_tokens": 1000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    return ClientRequest(
        "/v1/messages?beta=true",
        body,
        headers,
        ("context_management",),
        (SYSTEM, QUESTION, "# Environment", *((RESULT,) if messages else ())),
        ("x-anthropic-billing-header",),
    )


def chat(
    *messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: object
) -> ClientRequest:
    """Return a streaming chat with the tool and further messages."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            *messages,
        ],
        "tools": [{"type": "function", "function": SHELL}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    in_prompt = SYSTEM, QUESTION, *((RESULT,) if messages else ())
    return ClientRequest("/v1/chat/completions", body, headers or {}, in_prompt=in_prompt)


TOOL_TURN: tuple[dict[str, Any], ...] = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
)  # fmt: skip
QWEN_CODE_PARTS = [text_block("<system-reminder/>"), text_block(QUESTION)]
CLIENT_REQUESTS: dict[str, ClientRequest] = {
    "Codex": codex(),
    "Codex, tool turn": codex(
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "encrypted_content": "of another server",
        },
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ),
    "Claude Code": claude_code(),
    "Claude Code, tool turn": claude_code(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [text_block(RESULT)],
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ),
    "opencode": chat(
        *TOOL_TURN,
        max_tokens=1000,
        tool_choice="auto",
        headers={"x-session-affinity": "ses_1", "x-session-id": "ses_1"},
    ),
    "Qwen Code": chat(
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QWEN_CODE_PARTS},
        ],
        max_tokens=1000,
    ),
    "Open WebUI": ClientRequest(
        "/v1/chat/completions",
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": QUESTION}]},
    ),
    "Open WebUI with an Ollama connection": ClientRequest(
        "/api/chat",
        {
            "model": f"{MODEL}:latest",
            "stream": True,
            "messages": [{"role": "user", "content": QUESTION}],
            "options": {},
            "keep_alive": "5m",
        },
        ignored_fields=("keep_alive",),  # the key is no operator's
    ),
    "Continue, completion of code": ClientRequest(
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": f"<fim_prefix>{QUESTION}<fim_suffix><fim_middle>",
            "max_tokens": 100,
            "temperature": 0.01,
            "stop": ["<fim_prefix>", "\n\n"],
            "stream": True,
        },
    ),
    "LiteLLM to Ollama": ClientRequest(
        "/api/chat",
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": SYSTEM, "images": []},
                {"role": "user", "content": QUESTION, "images": []},
            ],
            "options": {},
            "stream": True,
            "tools": [{"type": "function", "function": SHELL}],
        },
    ),
    "LiteLLM to Anthropic": ClientRequest(
        "/v1/messages",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [text_block(QUESTION)]}],
            "max_tokens": 200,
            "system": [text_block(SYSTEM)],
            "tools": [
                {"type": "custom", "name": "shell", "description": "", "input_schema": SCHEMA}
            ],
            "stream": True,
        },
        {"anthropic-version": "2023-06-01"},
    ),
    "AI SDK": chat(*TOOL_TURN, max_tokens=256, temperature=0, tool_choice="none"),
}
LAST_EVENTS = {
    "/v1/responses": '"type":"response.completed"',
    "/v1/messages": '"type":"message_stop"',
    "/api/chat": '"done":true',
}


@pytest.mark.parametrize("request_", CLIENT_REQUESTS.values(), ids=CLIENT_REQUESTS.keys())
async def test_request_of_a_client_is_served(fleet: DialectFleet, request_: ClientRequest) -> None:
    headers = {"authorization": f"Bearer {fleet.key}", **request_.headers}
    response = await fleet.client.post(request_.path, json=request_.body, headers=headers)
    assert response.status_code == 200, response.text
    ignored = response.headers.get("x-argosy-ignored-fields", "")
    assert tuple(filter(None, ignored.split(","))) == request_.ignored_fields
    *_, last = filter(None, response.text.splitlines())
    assert LAST_EVENTS.get(request_.path.partition("?")[0], "[DONE]") in last
    (prompt,) = fleet.prompts()
    for text in request_.in_prompt:
        assert text in prompt
    for text in request_.not_in_prompt:
        assert text not in prompt
