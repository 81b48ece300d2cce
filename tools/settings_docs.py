"""Documentation of settings from the structs that hold them: Markdown tables, and a JSON Schema for editors."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import UnionType
from typing import Any

import msgspec

from argosy.settings import changed_by


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in escaped)


def attribute_docs(struct: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, bases included."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)  # noqa: S101 - getsource of a class
        for field, docstring in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(docstring, ast.Expr)
                and isinstance(docstring.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(docstring.value.value).split())
    return found


def description(annotation: Any) -> str:  # noqa: ANN401 - any type
    """Return the description in the annotation of a type or of a member of a union. Empty without one."""
    for part in (annotation, *typing.get_args(annotation)):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return ""


def describe_range(annotation: Any) -> str:  # noqa: ANN401 - any type
    """Return the range in the annotation of a number: `1 to 1024`. Empty without one."""
    for part in (annotation, *typing.get_args(annotation)):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.ge is not None:
                return f">= {meta.ge}" if meta.le is None else f"{meta.ge} to {meta.le}"
    return ""


def type_name(annotation: object) -> str:
    """Format a type as a reader of a YAML file would say it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{argument}`" for argument in arguments).replace("\\", "")
    if origin in {typing.Union, UnionType}:
        kept = [type_name(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(kept))
    if origin in {list, tuple, Sequence}:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type):
        if issubclass(annotation, msgspec.Struct):
            return "section"
        names = {str: "text", int: "integer", float: "number", bool: "`true` or `false`"}
        return names.get(annotation, annotation.__name__)
    return str(annotation)


def struct_in(annotation: object) -> type[msgspec.Struct] | None:
    """Return the structure that a field holds, in a list or mapping or optional; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    found = (struct_in(argument) for argument in typing.get_args(annotation))
    return next((struct for struct in found if struct is not None), None)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """Format the default of a field."""
    if field.required:
        return "required"
    made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if made else field.default
    if value is None or isinstance(value, msgspec.Struct):
        return ""
    return f"`{msgspec.json.encode(value).decode()}`".replace('"', "")


def settings(
    struct: type[msgspec.Struct], path: str, omitted: Collection[str] = ()
) -> Iterator[str]:
    """Yield one Markdown section for a structure, then one for each that it holds. Omitted paths are left out."""
    hints = typing.get_type_hints(struct, include_extras=True)
    docs, rows, nested = attribute_docs(struct), list[tuple[str, ...]](), []
    marks = changed_by(struct)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        inner = struct_in(hint)
        name = field.encode_name
        if (f"{path}.{name}" if path else name) in omitted:
            continue
        about = docs.get(field.name) or description(hint)
        who = (marks.get(field.name, ""),) if marks else ()
        rows.append((f"`{name}`", type_name(hint), default_text(field), *who, about))
        if inner is not None:
            shown = type_name(hint)
            item = "[]" if shown.startswith("list") else ".NAME" if shown == "mapping" else ""
            nested.append((inner, f"{path}.{name}{item}" if path else f"{name}{item}"))
    heading = f"## `{path}`" if path else "## Top level"
    about = inspect.cleandoc(struct.__doc__ or "")
    who = ("changed by",) if marks else ()
    header = ("setting", "type", "default", *who, "meaning")
    yield f"{heading}\n\n{about}\n\n{table(header, rows)}"
    for inner, below in nested:
        yield from settings(inner, below, omitted)


def json_schema(struct: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a structure, in which each setting has its description."""
    schema = msgspec.json.schema(struct)
    structs = {inner.__name__: inner for inner in _structs_in(struct)}
    for name, definition in schema["$defs"].items():
        docs = attribute_docs(structs[name])
        # Editors show the description beside a type, but none of a member of a union.
        docs |= {
            key: about
            for key, hint in typing.get_type_hints(structs[name], include_extras=True).items()
            if (about := description(hint))
        }
        for key, setting in definition.get("properties", {}).items():
            if key in docs:
                setting["description"] = docs[key].replace("`", "")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **schema,
    }


def _structs_in(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield struct
    for hint in typing.get_type_hints(struct, include_extras=True).values():
        inner = struct_in(hint)
        if inner is not None:
            yield from _structs_in(inner)
