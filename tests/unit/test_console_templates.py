"""Modules of the console: a tag that is not closed, which htm neither reports nor repairs, and unknown imports."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from argosy.gateway import console

STATIC = Path(console.__file__).parent / "static"
SOURCES = sorted(path for path in STATIC.rglob("*.js") if path.name != "vendor.js")
_TAG = re.compile(
    r"<(?P<close>/?)(?P<name>[a-zA-Z][\w-]*|\0?)(?P<attributes>(?:\"[^\"]*\"|[^>\"])*?)(?P<void>/?)>"
)
_IMPORT = re.compile(r"import \{([^}]*)\} from \"([^\"]+)\"")
_EXPORT = re.compile(r"export (?:async )?(?:const|let|function|class) (\w+)")
_HOLE = "\0"
"""Stands for an expression in a template. As the name of a tag it is a component."""


_INNERMOST = re.compile(r"html`((?:(?!\$\{)[^`])*)`")
"""Template of HTML without an expression."""
_BRACES = re.compile(r"(\$?)\{(?:[^{}`]|(?<!html)`(?:(?!\$\{)[^`])*`)*\}")
"""Braces, or an expression in a template, without other ones and without HTML."""


@functools.cache
def split_templates(path: Path) -> list[str]:
    """Return the html templates of a module, inner ones too, with a hole for each expression."""
    source = re.sub(r"^\s*//.*$|\\`", "", path.read_text(), flags=re.MULTILINE)
    templates: list[str] = []
    before = ""
    while source != before:
        before = source
        templates += _INNERMOST.findall(source)
        source = _INNERMOST.sub("", source)
        source = _BRACES.sub(lambda found: _HOLE if found[1] else "", source)
    return templates


def find_fault(template: str) -> str | None:
    """Return what is wrong with a template, or None."""
    open_tags: list[str] = []
    for tag in _TAG.finditer(template.replace(f"</{_HOLE}>", "<//>").replace("<//>", "</\0>")):
        if tag["close"]:
            if not open_tags:
                return f"{tag[0]!r} closes nothing"
            if open_tags.pop() != tag["name"]:
                return f"{tag[0]!r} closes another tag"
        elif not tag["void"]:
            open_tags.append(tag["name"])
    if open_tags:
        return f"<{open_tags[-1]}> is not closed"
    entity = re.search(r"&[a-z]+;", template)
    return None if entity is None else f"{entity[0]} is not decoded: write the character"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STATIC)))
def test_every_tag_of_every_template_is_closed(path: Path) -> None:
    faults = [
        f"{fault} in {template[:80]!r}"
        for template in split_templates(path)
        if (fault := find_fault(template)) is not None
    ]
    assert not faults


@pytest.mark.parametrize(
    ("template", "is_faulty"),
    [
        ("<tr><th>a</th><th>b</th></tr>", False),
        ("<tr><th>a<th>b</tr>", True),
        ("<b>x</i>", True),
        ("<br>", True),
        ("<br />", False),
        (f"<{_HOLE} a={_HOLE}>text<//>", False),
        (f"<{_HOLE} a={_HOLE} /><p>", True),
        ("a&nbsp;b", True),
    ],
)
def test_checker_finds_unclosed_tags(template: str, *, is_faulty: bool) -> None:
    assert (find_fault(template) is not None) == is_faulty


def test_no_text_becomes_markup() -> None:
    assert sum(len(split_templates(path)) for path in SOURCES) > 100
    for path in SOURCES:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", path.read_text()
        ), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STATIC)))
def test_every_imported_name_is_exported(path: Path) -> None:
    """A browser loads no screen that imports a name which does not exist."""
    for names, module in _IMPORT.findall(path.read_text()):
        exporting = (path.parent / module).resolve()
        if exporting.name != "vendor.js":
            imported = {name.split(" as ")[0].strip() for name in names.split(",")} - {""}
            assert imported <= set(_EXPORT.findall(exporting.read_text())), module
