"""Files in which checkpoints keep their chat templates, read with the precedence of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.engine.serving.text.checkpoint_files import read_json_object
from argosy.engine.serving.text.gguf_text import read_gguf_chat_template

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
"""File of the processors of older multimodal checkpoints."""
DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
"""Name of the template for conversations with tools."""


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """Jinja sources of a model's chat templates."""

    origin: str
    """File or folder of the templates for messages and logs, or `none`."""
    default: str | None = None
    """Source for conversations without tools. None if the model cannot take them."""
    tool_use: str | None = None
    """Source for conversations with tools. None means `default`."""


def read_template_sources(path: Path, override: str | None = None) -> TemplateSources:
    """Read the chat templates of a checkpoint.

    `chat_template.jinja` and `additional_chat_templates/` come first, as in transformers, then `chat_template` in
    tokenizer_config.json, then the `chat_template.json` of a processor.

    Args:
        path: Directory of the checkpoint, or GGUF file.
        override: Jinja file that replaces the templates, or the name of one of them for all conversations.

    Raises:
        ValueError: A template cannot be read or selected. The message includes the remedy.
    """
    origin, templates = _read_gguf_templates(path) if path.is_file() else _find_templates(path)
    if override is not None:
        if override in templates:
            return TemplateSources(f"{origin} ({override})", templates[override])
        return TemplateSources(override, _read_text(Path(override)))
    default, tool_use = templates.get(DEFAULT_NAME), templates.get(TOOL_NAME)
    if templates and default is None and tool_use is None:
        raise ValueError(
            f"{origin} has the chat templates {', '.join(sorted(templates))} and no default; "
            "select one with --chat-template"
        )
    return TemplateSources(origin, default, tool_use)


def _find_templates(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return the first place that has templates, and its templates by name."""
    file, folder = path / TEMPLATE_FILE, path / NAMED_TEMPLATES_FOLDER
    templates = {named.stem: _read_text(named) for named in sorted(folder.glob("*.jinja"))}
    if file.is_file():
        templates[DEFAULT_NAME] = _read_text(file)
    if templates:
        return str(file if file.is_file() else folder), templates
    for json_file in (path / TOKENIZER_CONFIG_FILE, path / PROCESSOR_TEMPLATE_FILE):
        templates = _parse_templates(json_file)
        if templates:
            return str(json_file), templates
    return "none", {}


def _read_gguf_templates(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return the GGUF file and its templates by name."""
    named = zip((DEFAULT_NAME, TOOL_NAME), read_gguf_chat_template(path), strict=True)
    templates = {name: source for name, source in named if source is not None}
    return (str(path), templates) if templates else ("none", {})


def _parse_templates(file: Path) -> dict[str, str]:
    """Return the templates of the field `chat_template`, a string or a list of named templates."""
    match read_json_object(file).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {DEFAULT_NAME: source}
        case list(items):
            named = [
                (item["name"], item["template"])
                for item in items
                if isinstance(item, dict) and {"name", "template"} <= set(item)
            ]
            if len(named) == len(items) and all(isinstance(text, str) for _, text in named):
                return dict(named)
    raise ValueError(
        f"chat_template of {file} is neither a string nor a list of named templates; correct it"
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the chat template {file} cannot be read ({error}); correct it or its permissions"
        ) from error
