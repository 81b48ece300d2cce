"""Tools of a chat request: which functions the model may or must call, checked and in one shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec

from argosy.constraints.grammar_text import input_grammars
from argosy.constraints.schema_vocabulary import schema_types
from argosy.protocol import ApiError, invalid_request

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
"""Largest JSON text of all tools, about 256k tokens of prompt."""
MAX_TOOL_DEPTH = 64
"""Deepest nesting of a tool. Chat templates render it recursively."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
"""Names of OpenAI's API (`[a-zA-Z0-9_-]{1,64}`) and of MCP servers, which have dots, colons and 128 characters."""
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
"""Request fields that `read_tools` reads."""

CUSTOM_INPUT = "input"
"""Name of the argument in which the model writes the free text of a custom tool."""
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
_NO_ARGUMENTS: dict[str, Any] = {**_ANY_OBJECT, "additionalProperties": False}
_CLOSABLE_KEYS = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords of a schema that allows no arguments if its properties are empty."""
_RENDERED_FIELDS = ("name", "description", "parameters")

ToolKind = Literal["function", "custom"]
ToolChoiceMode = Literal["none", "auto", "required", "named"]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Function or custom tool that a request offers to the model."""

    name: str
    """Name by which the model calls it."""
    kind: ToolKind = "function"
    """`function` takes JSON arguments. `custom` takes free text, which the model writes as one string argument."""
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=_ANY_OBJECT.copy)
    """JSON Schema of the arguments. A custom tool has the one string argument `CUSTOM_INPUT`."""
    strict: bool = False
    """Whether the arguments must be valid by construction."""
    input_grammar: str = ""
    """Lark grammar of the input of a custom tool. Empty if the input is any text, or that of a regular expression."""
    template_value: dict[str, Any] = field(default_factory=dict)
    """The tool as chat templates expect it, with the client's order of keys and without `strict`."""
    param: str = "tools"
    """Path of the tool in the request."""
    schema_param: str = "tools"
    """Path of its schema in the request."""

    @cached_property
    def parameter_types(self) -> Mapping[str, frozenset[str]]:
        """JSON types that each declared parameter may have. An empty set means any type."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, dict):
            return {}
        return {key: schema_types(schema, self.parameters) for key, schema in properties.items()}

    @property
    def required(self) -> frozenset[str]:
        """Names of the parameters that every call needs."""
        required = self.parameters.get("required")
        return frozenset(required) if isinstance(required, list) else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the model may or must call."""

    mode: ToolChoiceMode = "none"
    """`named` requires a call of the only tool in `allowed`."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that may be called; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """Tool fields of a request."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    """Whether one message may have several calls."""
    is_legacy: bool = False
    """Whether the request used `functions`, whose response has a `function_call` instead of tool calls."""
    ignored: tuple[str, ...] = ()
    """Paths of the tools that were ignored because of their type, such as web search."""

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.template_value for tool in self.tools]

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        choice = self.choice
        if choice.mode == "none":
            return ()
        if choice.allowed is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name in choice.allowed)


def read_tools(fields: Mapping[str, Any]) -> ToolRequest:
    """Read `TOOL_FIELDS` of a decoded request. Other fields are not read; None means absent.

    The schemas of the arguments are not compiled here.

    Raises:
        ApiError(400): A tool is malformed, or the choice does not fit the tools. `param` is its path.
    """
    is_legacy = bool(fields.get("functions"))
    list_name = "functions" if is_legacy else "tools"
    _check_exclusive(fields, is_legacy=is_legacy)
    items = _optional(fields.get(list_name), list, list_name) or []
    _check_size(items, list_name)
    tools: list[Tool] = []
    ignored: list[str] = []
    for index, item in enumerate(items):
        path = f"{list_name}[{index}]"
        value = _check_type(item, dict, path)
        tool = _read_function(value, path, path) if is_legacy else _read_tool(value, path)
        if tool is None:
            ignored.append(path)
        else:
            tools.append(tool)
    _check_names(tools)
    choice = _read_choice(fields, tools, is_legacy=is_legacy)
    parallel = _optional(fields.get("parallel_tool_calls"), bool, "parallel_tool_calls")
    return ToolRequest(
        tools=tuple(tools),
        choice=choice,
        parallel=parallel is not False and not is_legacy,
        is_legacy=is_legacy,
        ignored=tuple(ignored),
    )


def _check_exclusive(fields: Mapping[str, Any], *, is_legacy: bool) -> None:
    """Raise for a mixture of `tools` and the older `functions` with their choices."""
    if is_legacy and fields.get("tools"):
        message = "'functions' and 'tools' exclude each other. Move the functions to 'tools'."
        raise invalid_request(message, "functions")
    other_choice = "tool_choice" if is_legacy else "function_call"
    if fields.get(other_choice) not in (None, "none", "auto"):
        choice = "function_call" if is_legacy else "tool_choice"
        raise invalid_request(f"'{other_choice}' has no effect here. Use '{choice}'.", other_choice)


# --- definitions ---------------------------------------------------------------------------------


def _read_tool(item: dict[str, Any], path: str) -> Tool | None:
    """Read one item of `tools`. Return None for a type that only other services can run."""
    kind = item.get("type", "function")
    if kind == "function":
        body_path = f"{path}.function"
        return _read_function(_require(item, "function", path, dict), path, body_path)
    if kind == "custom":
        return _read_custom(_require(item, "custom", path, dict), path)
    _check_type(kind, str, f"{path}.type")
    return None


def _read_function(body: dict[str, Any], path: str, body_path: str) -> Tool:
    schema_param = f"{body_path}.parameters"
    parameters = _optional(body.get("parameters"), dict, schema_param)
    if parameters is not None and parameters.get("type", "object") != "object":
        message = (
            f"'{schema_param}' must be a schema of type object, because arguments have names. "
            'Set its type to "object".'
        )
        raise invalid_request(message, f"{schema_param}.type")
    template_value = {
        "type": "function",
        "function": {
            key: value
            for key, value in body.items()
            if key in _RENDERED_FIELDS and value is not None
        },
    }
    return Tool(
        name=_read_name(body, body_path),
        description=_optional(body.get("description"), str, f"{body_path}.description") or "",
        parameters=_NO_ARGUMENTS if _takes_no_arguments(parameters) else parameters or _ANY_OBJECT,
        strict=bool(_optional(body.get("strict"), bool, f"{body_path}.strict")),
        template_value=template_value,
        param=path,
        schema_param=schema_param,
    )


def _takes_no_arguments(parameters: dict[str, Any] | None) -> bool:
    """Return whether a function has no parameters: none are declared (OpenAI), or an empty list of properties."""
    if parameters is None:
        return True
    is_empty = parameters.get("properties") == {} and not parameters.get("required")
    return is_empty and parameters.keys() <= _CLOSABLE_KEYS


def _read_custom(body: dict[str, Any], path: str) -> Tool:
    """Read a custom tool, which is offered to the model as a function with one string argument."""
    body_path = f"{path}.custom"
    name = _read_name(body, body_path)
    description = _optional(body.get("description"), str, f"{body_path}.description") or ""
    syntax, definition = _read_custom_format(body, f"{body_path}.format")
    pattern = f"^(?:{definition})$" if syntax == "regex" else None
    if syntax == "lark":
        input_grammars(definition, f"{body_path}.format", CUSTOM_INPUT, is_quoted=True)
        description = f"{description}\n\nThe input follows this Lark grammar:\n{definition}".strip()
    input_schema = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: input_schema},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool(
        name=name,
        kind="custom",
        description=description,
        parameters=parameters,
        strict=bool(syntax),
        input_grammar=definition if syntax == "lark" else "",
        template_value={"type": "function", "function": function},
        param=path,
        schema_param=f"{body_path}.format",
    )


def _read_custom_format(body: dict[str, Any], path: str) -> tuple[str, str]:
    """Return the syntax and the definition of the input of a custom tool. Empty for any text."""
    text_format = _optional(body.get("format"), dict, path) or {"type": "text"}
    kind = text_format.get("type")
    if kind == "text":
        return "", ""
    if kind != "grammar":
        raise invalid_request(f"'{path}.type' must be text or grammar.", f"{path}.type")
    # OpenAI's chat API nests the grammar, its Responses API does not.
    grammar = _check_type(text_format.get("grammar", text_format), dict, f"{path}.grammar")
    definition = _require(grammar, "definition", f"{path}.grammar", str)
    syntax = _require(grammar, "syntax", f"{path}.grammar", str)
    if syntax not in {"lark", "regex"}:
        message = f"'{path}' has a grammar of an unknown syntax. Use the syntax lark or regex."
        raise invalid_request(message, path, "unsupported_parameter")
    return syntax, definition


def _read_name(body: dict[str, Any], path: str) -> str:
    name = _require(body, "name", path, str)
    if not TOOL_NAME.fullmatch(name):
        message = (
            f"'{path}.name' must have 1 to 128 letters, digits or the characters '_', '-', '.' and ':'. "
            "Rename the tool."
        )
        raise invalid_request(message, f"{path}.name")
    return name


def _check_names(tools: Sequence[Tool]) -> None:
    first: dict[str, Tool] = {}
    for tool in tools:
        other = first.setdefault(tool.name, tool)
        if other is not tool:
            message = f"'{tool.param}' has the name of '{other.param}', {tool.name!r}. Rename one."
            raise invalid_request(message, tool.param)


def _check_size(items: list[Any], path: str) -> None:
    if len(items) > MAX_TOOLS:
        message = f"'{path}' has {len(items)} tools. Send at most {MAX_TOOLS}."
        raise invalid_request(message, path)
    level: list[object] = [items]
    for _ in range(MAX_TOOL_DEPTH):
        level = [child for value in level for child in _children(value)]
    if level:
        message = f"'{path}' is nested more than {MAX_TOOL_DEPTH} levels deep. Flatten it."
        raise invalid_request(message, path)
    size = len(msgspec.json.encode(items))
    if size > MAX_TOOLS_BYTES:
        message = f"'{path}' has {size} bytes. Send at most {MAX_TOOLS_BYTES}."
        raise invalid_request(message, path)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# --- choice --------------------------------------------------------------------------------------


def _read_choice(
    fields: Mapping[str, Any], tools: Sequence[Tool], *, is_legacy: bool
) -> ToolChoice:
    param = "function_call" if is_legacy else "tool_choice"
    value = fields.get(param)
    if value is None:
        choice = ToolChoice(mode="auto")
    elif isinstance(value, str):
        choice = _read_mode(value, param, is_legacy=is_legacy)
    else:
        choice = _read_choice_object(_check_type(value, dict, param), param, is_legacy=is_legacy)
    if not tools:
        if choice.mode in {"required", "named"}:
            message = f"'{param}' requires a call, but the request has no tool that can be called. Add one."
            raise invalid_request(message, param)
        return ToolChoice(mode="none")
    names = {tool.name for tool in tools}
    for name in choice.allowed or ():
        if name not in names:
            shown = name if TOOL_NAME.fullmatch(name) else name[:128]
            message = (
                f"'{param}' names {shown!r}, which is no tool of the request. Add it to 'tools'."
            )
            raise invalid_request(message, param)
    return choice


def _read_mode(value: str, param: str, *, is_legacy: bool) -> ToolChoice:
    match value:
        case "none":
            return ToolChoice(mode="none")
        case "auto":
            return ToolChoice(mode="auto")
        case "required" if not is_legacy:
            return ToolChoice(mode="required")
    modes = "none, auto" if is_legacy else "none, auto, required"
    message = f"'{param}' must be one of {modes}, or an object that names a tool."
    raise invalid_request(message, param)


def _read_choice_object(value: dict[str, Any], param: str, *, is_legacy: bool) -> ToolChoice:
    if is_legacy:
        return ToolChoice(mode="named", allowed=(_require(value, "name", param, str),))
    kind = value.get("type", "function")
    if kind == "allowed_tools":
        return _read_allowed_tools(value, param)
    return ToolChoice(mode="named", allowed=(_read_reference(value, param),))


def _read_allowed_tools(value: dict[str, Any], param: str) -> ToolChoice:
    """Read a choice that restricts the calls to some of the tools."""
    # OpenAI's chat API nests the fields, its Responses API does not.
    path = f"{param}.allowed_tools" if "allowed_tools" in value else param
    body = _check_type(value.get("allowed_tools", value), dict, path)
    mode = _optional(body.get("mode"), str, f"{path}.mode") or "auto"
    if mode not in {"auto", "required"}:
        raise invalid_request(f"'{path}.mode' must be auto or required.", f"{path}.mode")
    references = _require(body, "tools", path, list)
    if not references:
        raise invalid_request(f"'{path}.tools' is empty. Name a tool.", f"{path}.tools")
    names = [
        _read_reference(_check_type(item, dict, f"{path}.tools[{index}]"), f"{path}.tools[{index}]")
        for index, item in enumerate(references)
    ]
    return ToolChoice(
        mode="required" if mode == "required" else "auto", allowed=tuple(dict.fromkeys(names))
    )


def _read_reference(value: dict[str, Any], path: str) -> str:
    """Return the name of the tool to which `{"type": "function", "function": {"name": ...}}` refers."""
    kind = _optional(value.get("type"), str, f"{path}.type") or "function"
    if kind not in {"function", "custom"}:
        raise invalid_request(f"'{path}.type' must be function or custom.", f"{path}.type")
    if "name" in value:  # the Responses API's shape
        return _require(value, "name", path, str)
    return _require(_require(value, kind, path, dict), "name", f"{path}.{kind}", str)


# --- values --------------------------------------------------------------------------------------

_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
}


def _require(body: Mapping[str, Any], name: str, path: str, type_: type[Value]) -> Value:
    """Return a field of an object, which must have it."""
    param = f"{path}.{name}"
    value = body.get(name)
    if value is None:
        raise ApiError(
            400, "missing_required_parameter", f"Missing parameter '{param}'. Add it.", param=param
        )
    return _check_type(value, type_, param)


def _optional(value: object, type_: type[Value], param: str) -> Value | None:
    """Return a value of the type, or None."""
    return None if value is None else _check_type(value, type_, param)


def _check_type(value: object, type_: type[Value], param: str) -> Value:
    if not isinstance(value, type_):
        raise invalid_request(f"'{param}' must be {_TYPE_NAMES[type_]}.", param, "invalid_type")
    return value
