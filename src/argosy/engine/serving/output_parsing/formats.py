# ruff: noqa: RUF001 - DeepSeek's markers contain full-width bars
"""Formats of the output of model families, as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from argosy.engine.serving.output_parsing import harmony
from argosy.engine.serving.output_parsing.harmony import HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax, NamedJsonSyntax
from argosy.engine.serving.output_parsing.mapping_calls import MappingSyntax
from argosy.engine.serving.output_parsing.output_format import (
    AnswerFrame,
    OutputFormat,
    ThinkingBlock,
)
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

_THINK = ThinkingBlock("<think>", "</think>")
_THINK_TOKENS = ("<think>", "</think>")
_TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")


def _dsml(name: str, description: str, section: str, space: str = "") -> OutputFormat:
    """Return a format of DeepSeek since V3.2, which differ in the names of their tags."""
    tag = f"｜DSML｜{space}"
    return OutputFormat(
        name=name,
        description=description,
        syntax=TagSyntax(
            section_open=f"<｜DSML｜{section}>",
            section_close=f"</｜DSML｜{section}>",
            name_open=f'<{tag}invoke name="',
            name_close='"',
            call_close=f"</{tag}invoke>",
            key_open=f'<{tag}parameter name="',
            key_close='"',
            value_close=f"</{tag}parameter>",
            tag_end=">",
            type_attribute="string",
            separator="\n",
            call_separator="\n",
        ),
        thinking=(_THINK,),
        tokens=("｜DSML｜", *_THINK_TOKENS),
        triggers=("｜DSML｜",),
    )


def _deepseek(name: str, description: str, syntax: NamedJsonSyntax) -> OutputFormat:
    return OutputFormat(
        name=name,
        description=description,
        syntax=syntax,
        thinking=(_THINK,),
        tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            *_THINK_TOKENS,
        ),
        trims_content=False,
        triggers=("<｜tool▁calls▁begin｜>",),
    )


_MISTRAL_BLOCKS = (ThinkingBlock("[THINK]", "[/THINK]"), _THINK)
_ALL_FORMATS = (
    OutputFormat(
        name="hermes",
        description="Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, Granite 4",
        syntax=JsonSyntax(
            open=("<tool_call>",),
            close="</tool_call>",
            separator="\n",
        ),
        thinking=(_THINK,),
        tokens=(*_TOOL_CALL_TOKENS, *_THINK_TOKENS),
        triggers=("<tool_call>",),
    ),
    OutputFormat(
        name="qwen3-xml",
        description="Qwen3-Coder, Qwen3.5 and later, Nemotron 3",
        syntax=TagSyntax(
            wrapper_open="<tool_call>",
            wrapper_close="</tool_call>",
            name_open="<function=",
            name_close=">",
            call_close="</function>",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
            has_bare_calls=True,
            has_line_breaks=True,
            separator="\n",
            call_separator="\n",
        ),
        thinking=(_THINK,),
        tokens=(*_TOOL_CALL_TOKENS, *_THINK_TOKENS),
        triggers=("<tool_call>",),
        call_ends_reasoning=True,
    ),
    OutputFormat(
        name="llama3-json",
        description="Llama 3.1, 3.2 and 3.3",
        syntax=JsonSyntax(
            open=("", "<|python_tag|>"),
            arguments_key="parameters",
            separator="; ",
        ),
        tokens=("<|python_tag|>",),
        trims_content=False,
    ),
    OutputFormat(
        name="pythonic",
        description="Llama 4, Llama 3.2 with Python calls, ToolACE, OLMo 3",
        syntax=PythonSyntax(open="<|python_start|>", close="<|python_end|>", is_bare=True),
        tokens=("<|python_start|>", "<|python_end|>"),
        trims_content=False,
    ),
    OutputFormat(
        name="mistral-v3",
        description="Mistral 7B v0.3, Mixtral v0.3, Mistral Nemo, Mistral Large 2",
        syntax=JsonSyntax(open=("[TOOL_CALLS]",), is_array=True, separator=", "),
        thinking=_MISTRAL_BLOCKS,
        tokens=("[TOOL_CALLS]",),
        trims_content=False,
        triggers=("[TOOL_CALLS]",),
        call_ids="nine_characters",
    ),
    OutputFormat(
        name="mistral-v11",
        description="Mistral Small 3.2, Devstral, Magistral, Ministral 3, Mistral Medium 3.5",
        syntax=NamedJsonSyntax(call_open="[TOOL_CALLS]", name_end=("[ARGS]",), id_open="[CALL_ID]"),
        thinking=_MISTRAL_BLOCKS,
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        trims_content=False,
        triggers=("[TOOL_CALLS]",),
        call_ids="nine_characters",
    ),
    _deepseek(
        "deepseek-v3",
        "DeepSeek V3, V3-0324, R1",
        NamedJsonSyntax(
            section_open="<｜tool▁calls▁begin｜>",
            section_close="<｜tool▁calls▁end｜>",
            call_open="<｜tool▁call▁begin｜>",
            call_close="<｜tool▁call▁end｜>",
            name_prefix="function<｜tool▁sep｜>",
            name_end=("\n",),
            arguments_open="```json\n",
            arguments_close="\n```",
            separator="\n",
        ),
    ),
    _deepseek(
        "deepseek-v31",
        "DeepSeek V3.1",
        NamedJsonSyntax(
            section_open="<｜tool▁calls▁begin｜>",
            section_close="<｜tool▁calls▁end｜>",
            call_open="<｜tool▁call▁begin｜>",
            call_close="<｜tool▁call▁end｜>",
            name_end=("<｜tool▁sep｜>",),
        ),
    ),
    _dsml("deepseek-v32", "DeepSeek V3.2", "function_calls"),
    _dsml("deepseek-v4", "DeepSeek V4", "tool_calls"),
    _dsml("deepseek-v41", "DeepSeek V4.1", " calls", " "),
    OutputFormat(
        name="gpt-oss",
        description="gpt-oss",
        syntax=HarmonySyntax(),
        thinking=(
            ThinkingBlock(
                f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
                harmony.END,
            ),
        ),
        tokens=harmony.TOKENS,
        trims_content=False,
        trims_reasoning=False,
    ),
    OutputFormat(
        name="glm45",
        description="GLM-4.5 and later",
        syntax=TagSyntax(
            wrapper_open="<tool_call>",
            wrapper_close="</tool_call>",
            name_close="",
            key_open="<arg_key>",
            key_close="</arg_key>",
            value_open="<arg_value>",
            value_close="</arg_value>",
            separator="\n",
            call_separator="\n",
        ),
        thinking=(_THINK,),
        tokens=(
            *_TOOL_CALL_TOKENS,
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            *_THINK_TOKENS,
        ),
        triggers=("<tool_call>",),
    ),
    OutputFormat(
        name="kimi-k2",
        description="Kimi K2",
        syntax=NamedJsonSyntax(
            section_open="<|tool_calls_section_begin|>",
            section_close="<|tool_calls_section_end|>",
            call_open="<|tool_call_begin|>",
            call_close="<|tool_call_end|>",
            optional_prefix="functions.",
            name_end=("<|tool_call_argument_begin|>",),
            has_index=True,
        ),
        thinking=(_THINK,),
        tokens=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            *_THINK_TOKENS,
        ),
        trims_content=False,
        triggers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        call_ids="kimi",
    ),
    OutputFormat(
        name="kimi-k3",
        description="Kimi K3",
        syntax=TagSyntax(
            section_open="<|open|>tools<|sep|>",
            section_close="<|close|>tools<|sep|>",
            name_open='<|open|>call tool="',
            name_close='"',
            call_close="<|close|>call<|sep|>",
            key_open='<|open|>argument key="',
            key_close='"',
            value_close="<|close|>argument<|sep|>",
            tag_end="<|sep|>",
            type_attribute="type",
            has_escapes=True,
            has_index=True,
        ),
        thinking=(ThinkingBlock("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        trims_content=False,
        frame=AnswerFrame(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
        reasoning_enders=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
    OutputFormat(
        name="gemma4",
        description="Gemma 4",
        syntax=MappingSyntax(open="<|tool_call>", close="<tool_call|>", quote='<|"|>'),
        thinking=(ThinkingBlock("<|channel>", "<channel|>", "thought"),),
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        trims_content=False,
        triggers=("<|tool_call>",),
    ),
    OutputFormat(
        name="functiongemma",
        description="FunctionGemma",
        syntax=MappingSyntax(
            open="<start_function_call>", close="<end_function_call>", quote="<escape>"
        ),
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        triggers=("<start_function_call>",),
    ),
    OutputFormat(
        name="phi4-mini",
        description="Phi-4-mini",
        syntax=JsonSyntax(
            open=("<|tool_call|>",),
            close="<|/tool_call|>",
            is_array=True,
            separator=", ",
        ),
        thinking=(_THINK,),
        tokens=("<|tool_call|>", "<|/tool_call|>", *_THINK_TOKENS),
        triggers=("<|tool_call|>",),
    ),
    OutputFormat(
        name="granite",
        description="Granite 3.0 to 3.3",
        syntax=JsonSyntax(open=("<|tool_call|>", "<tool_call>"), is_array=True, separator=", "),
        thinking=(_THINK,),
        tokens=("<|tool_call|>", "<tool_call>", *_THINK_TOKENS),
        triggers=("<|tool_call|>",),
    ),
    OutputFormat(
        name="minimax-m2",
        description="MiniMax M2",
        syntax=TagSyntax(
            section_open="<minimax:tool_call>",
            section_close="</minimax:tool_call>",
            name_open='<invoke name="',
            name_close='"',
            call_close="</invoke>",
            key_open='<parameter name="',
            key_close='"',
            value_close="</parameter>",
            tag_end=">",
            separator="\n",
            call_separator="\n",
        ),
        thinking=(_THINK,),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK_TOKENS),
        triggers=("<minimax:tool_call>",),
    ),
    OutputFormat(
        name="seed-oss",
        description="Seed-OSS",
        syntax=TagSyntax(
            wrapper_open="<seed:tool_call>",
            wrapper_close="</seed:tool_call>",
            name_open="<function=",
            name_close=">",
            call_close="</function>",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
            separator="\n",
            call_separator="\n",
        ),
        thinking=(ThinkingBlock("<seed:think>", "</seed:think>"),),
        tokens=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        triggers=("<seed:tool_call>",),
    ),
    OutputFormat(
        name="nemotron-json",
        description="Nemotron Nano and Super",
        syntax=JsonSyntax(open=("<TOOLCALL>",), close="</TOOLCALL>", is_array=True, separator=", "),
        thinking=(_THINK,),
        tokens=("<TOOLCALL>", "</TOOLCALL>", *_THINK_TOKENS),
        triggers=("<TOOLCALL>",),
    ),
    OutputFormat(
        name="apriel",
        description="Apriel 1.5 and 1.6",
        syntax=JsonSyntax(
            open=("<tool_calls>",), close="</tool_calls>", is_array=True, separator=", "
        ),
        tokens=("<tool_calls>", "</tool_calls>"),
        triggers=("<tool_calls>",),
    ),
    OutputFormat(
        name="hunyuan",
        description="Hunyuan",
        syntax=NamedJsonSyntax(
            section_open="<tool_calls>",
            section_close="</tool_calls>",
            call_open="<tool_call>",
            call_close="</tool_call>",
            name_end=("\n",),
            arguments_open="```json\n",
            arguments_close="\n```",
            separator="\n",
        ),
        thinking=(_THINK,),
        tokens=("<tool_calls>", "</tool_calls>", *_TOOL_CALL_TOKENS, *_THINK_TOKENS),
        triggers=("<tool_calls>",),
    ),
    OutputFormat(
        name="longcat",
        description="LongCat",
        syntax=JsonSyntax(
            open=("<longcat_tool_call>",), close="</longcat_tool_call>", separator="\n"
        ),
        thinking=(ThinkingBlock("<longcat_think>", "</longcat_think>"),),
        tokens=(
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            "<longcat_think>",
            "</longcat_think>",
        ),
        triggers=("<longcat_tool_call>",),
    ),
    OutputFormat(
        name="lfm2",
        description="LFM2, LFM2.5",
        syntax=PythonSyntax(open="<|tool_call_start|>", close="<|tool_call_end|>"),
        thinking=(_THINK,),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>", *_THINK_TOKENS),
        triggers=("<|tool_call_start|>",),
        trims_content=False,
    ),
    OutputFormat(
        name="xlam",
        description="xLAM 2",
        syntax=JsonSyntax(open=("",), is_array=True, separator=", "),
        trims_content=False,
    ),
    OutputFormat(
        name="think",
        description="Models with <think> and without tool calls",
        thinking=(_THINK,),
        tokens=_THINK_TOKENS,
    ),
)
FORMATS: Mapping[str, OutputFormat] = MappingProxyType(
    {output_format.name: output_format for output_format in _ALL_FORMATS}
)
"""Formats by their name."""
