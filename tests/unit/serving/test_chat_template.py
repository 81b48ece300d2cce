"""Chat templates of Hugging Face checkpoints, and the errors that they can cause."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from tests.support.vocabularies import TEMPLATE, byte_level_backend, write_checkpoint

from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.message_forms import complete_tool
from argosy.protocol import ApiError

HELLO = [{"role": "user", "content": "Hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 11, 20, tzinfo=UTC))


def render_error(source: str, **arguments: Any) -> ApiError:  # noqa: ANN401 - as `render` takes them
    with pytest.raises(ApiError) as caught:
        template(source).render(HELLO, **arguments)
    assert caught.value.status == 400
    return caught.value


def test_messages_and_generation_prompt_are_rendered() -> None:
    chat = template(TEMPLATE)
    assert chat.render(HELLO) == "<|user|>user: Hello<|end|>\n<|user|>assistant:"
    assert chat.render(HELLO, add_generation_prompt=False) == "<|user|>user: Hello<|end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}|", "<s>||"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ strftime_now('%d %b %Y') }}", "20 Nov 2026"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ messages[0]['content'] }}{{ absent }}", "Hello"),
    ],
)
def test_template_features_are_supported(source: str, text: str) -> None:
    assert template(source).render(HELLO) == text


def test_request_variables_reach_the_template() -> None:
    chat = template("{{ enable_thinking }} {{ bos_token }}")
    assert chat.render(HELLO, variables={"enable_thinking": False}) == "False <s>"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_request_variables_cannot_replace_built_in_ones(name: str) -> None:
    assert render_error("x", variables={name: 1}).param == f"chat_template_kwargs.{name}"


def test_raise_exception_gives_the_templates_message() -> None:
    error = render_error("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in error.message
    assert error.code == "chat_template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ absent.field }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ 1 + 'a' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ absent_function() }}",
        "{{ cycler | tojson }}",
    ],
)
def test_failing_template_is_a_client_error(source: str) -> None:
    assert render_error(source).code == "chat_template_error"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 'a' * (10 ** 9) }}", "MiB of memory"),
        ("{% set n = messages | length + 8 %}{{ n ** (n ** n) }}", "1 s of CPU time"),
        ("{% set s = 'a' * (10 ** 9 + messages | length) %}{{ s | length }}", "MiB of memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "33,554,432 characters"),
    ],
)
def test_hostile_template_is_stopped(source: str, limit: str) -> None:
    error = render_error(source)
    assert error.code == "chat_template_limit_exceeded"
    assert limit in error.message
    assert template(TEMPLATE).render(HELLO).startswith("<|user|>")


def render_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE  # left by another test
        and any("render_process" in arg for arg in child.cmdline())
    ]


def test_render_process_has_no_secret_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "secret")
    for process in render_processes():
        process.kill()
        process.wait()
    assert template("{{ 1 }}").render([]) == "1"
    assert render_processes()
    for process in render_processes():
        assert "secret" not in process.environ().values()


@pytest.mark.parametrize("is_rendering", [False, True])
def test_killed_render_process_is_replaced(is_rendering: bool) -> None:
    chat = template(TEMPLATE)
    chat.render(HELLO)
    processes = render_processes()
    with ThreadPoolExecutor() as threads:
        if is_rendering:
            for process in processes:
                process.suspend()
            rendered = threads.submit(chat.render, HELLO)
        for process in processes:
            process.kill()
            process.wait()
        if not is_rendering:
            rendered = threads.submit(chat.render, HELLO)
        assert rendered.result().startswith("<|user|>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
        "{% if true %}" * 20_000 + "{% endif %}" * 20_000,
        "x" * 2_000_000,
    ],
    ids=["time", "parentheses", "blocks", "length"],
)
def test_template_that_cannot_be_compiled_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*--chat-template"):
        ChatTemplate.load(tmp_path)


def test_model_without_template_rejects_messages(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate.load(tmp_path).render(HELLO)
    assert (caught.value.status, caught.value.code) == (400, "no_chat_template")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}<end>", "Hel lo "),
        ("{{ messages[0].content | trim }}<end>", "Hel lo"),
        ("<b>{{ messages[0].content }}", "<b>Hel lo "),
    ],
)
def test_continued_final_message_ends_the_prompt(source: str, text: str) -> None:
    messages = [{"role": "assistant", "content": "Hel lo "}]
    rendered = template(source).render(messages, continue_final_message=True)
    assert rendered == text
    assert messages == [{"role": "assistant", "content": "Hel lo "}]


def test_template_without_final_message_cannot_continue_it() -> None:
    error = render_error("fixed", continue_final_message=True)
    assert error.param == "continue_final_message"


def test_developer_role_becomes_system_unless_template_supports_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(messages) == "system"
    branching = "{% if messages[0].role == 'developer' %}known{% endif %}"
    assert template(branching).render(messages) == "known"


DESCRIBED = (
    "{% for t in tools or [] %}{{ '//' + t.function.description }}{{ t.function.name }}{% endfor %}"
)
PARAMETERS = (
    "{% for t in tools or [] %}{{ t.function.name ~ t.function.parameters.properties }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "needed"),
    [("{{ tools }}", ()), (DESCRIBED, ("description",)), (PARAMETERS, ("parameters",))],
)
def test_optional_fields_of_tools_are_filled_in_if_the_template_needs_them(
    source: str, needed: tuple[str, ...]
) -> None:
    can = template(source + "{{ messages[0].content }}").capabilities(with_tools=True)
    assert can.needed_tool_fields == needed
    tool = {"type": "function", "function": {"name": "f"}}
    assert complete_tool(tool, can)["function"].keys() == {"name", *needed}


PLACES = {
    "chat_template.jinja": "from the file",
    "additional_chat_templates/tool_use.jinja": "from the folder",
    "tokenizer_config.json": json.dumps({"chat_template": "from the tokenizer"}),
    "chat_template.json": json.dumps(
        {
            "chat_template": [
                {"name": "tool_use", "template": "with tools"},
                {"name": "default", "template": "from the processor"},
            ]
        }
    ),
}


@pytest.mark.parametrize(
    ("places", "plain", "with_tools"),
    [
        ([0, 1, 2, 3], "from the file", "from the folder"),
        ([0, 2, 3], "from the file", "from the file"),
        ([1, 2], None, "from the folder"),
        ([2, 3], "from the tokenizer", "from the tokenizer"),
        ([3], "from the processor", "with tools"),
    ],
)
def test_templates_are_found_as_in_transformers(
    tmp_path: Path, places: list[int], plain: str | None, with_tools: str
) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    for index in places:
        name = list(PLACES)[index]
        (tmp_path / name).write_text(PLACES[name])
    template = ChatTemplate.load(tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    if places != [3]:  # a tokenizer of transformers reads no files of processors
        assert reference.get_chat_template(tools=tools) == with_tools
    assert template.render(HELLO, tools=tools) == with_tools
    if plain is None:
        with pytest.raises(ValueError, match="default"):
            reference.get_chat_template()
        with pytest.raises(ApiError) as caught:
            template.render(HELLO)
        assert caught.value.code == "no_chat_template"
    else:
        assert template.render(HELLO) == plain


def test_named_template_or_file_is_selected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    with pytest.raises(ValueError, match=r"rag.*--chat-template"):
        ChatTemplate.load(tmp_path)
    assert ChatTemplate.load(tmp_path, "rag").render(HELLO) == "rag"
    override = tmp_path / "mine.jinja"
    override.write_text("mine {{ bos_token }}{{ eos_token }}")
    assert ChatTemplate.load(tmp_path, str(override)).render(HELLO) == "mine <|begin|><|end|>"


def test_unreadable_template_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*--chat-template"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ValueError, match="absent"):
        ChatTemplate.load(tmp_path, "absent.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ValueError, match="a string nor a list"):
        ChatTemplate.load(tmp_path)
