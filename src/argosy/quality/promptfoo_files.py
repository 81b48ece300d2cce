"""Reader of promptfoo's configurations and test files, as far as they contain no code."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy.policy.prompts import PromptContent, PromptError, compile_prompt
from argosy.quality.golden_set import (
    ASSERTION_TYPES,
    MAX_ITEMS,
    MAX_SET_BYTES,
    PARAMETERS,
    Assertion,
    GoldenItem,
    GoldenSet,
)
from argosy.settings import load_yaml

_CODE_KEYS = frozenset(
    {
        *("assertScoringFunction", "contextTransform", "extensions", "nunjucksFilters"),
        *("postprocess", "rubricPrompt", "scenarios", "transform", "transformVars"),
    }
)
_CODE_PREFIXES = ("javascript", "python", "fn", "eval", "ruby", "webhook", "exec")
_MAX_SHOWN = 10
_FILE = "file://"


class _Refusals:
    """Parts of a file that are refused, by name, each with its place."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, place: str, name: str, reason: str) -> None:
        self._found.append(f"{place}: `{name}` is refused: {reason}")

    def raise_found(self) -> None:
        """Raise ValueError if anything was refused."""
        if self._found:
            more = len(self._found) - _MAX_SHOWN
            shown = "; ".join(self._found[:_MAX_SHOWN]) + (f"; {more} more" if more > 0 else "")
            raise ValueError(f"{shown}. Remove or replace them, and import again.")


def read_promptfoo(path: Path, document: object, prompt: str | None) -> GoldenSet:
    """Return the set of a configuration, or of a list of tests. Raises ValueError if a part is refused."""
    refusals = _Refusals()
    config = {"tests": document} if isinstance(document, list) else document
    if not isinstance(config, dict):
        raise ValueError("it is neither a configuration nor a list of tests")  # noqa: TRY004 - of a file
    _refuse_code(config, "configuration", refusals)
    default = config.get("defaultTest") or {}
    if not isinstance(default, dict):
        refusals.add("defaultTest", str(default)[:100], "write it in the configuration")
        default = {}
    tests = list(_list_tests(path, config.get("tests") or [{}], refusals))
    shared = config.get("assertionTemplates") or {}
    for test in (default, *tests):
        test["assert"] = [_resolve(each, shared) for each in test.get("assert") or []]
    templates = [prompt] if prompt else list(_list_prompts(path, config.get("prompts"), refusals))
    refusals.raise_found()
    items = list(_build_items(path, templates, default, tests, refusals))
    parameters = _read_parameters(config.get("providers") or config.get("targets"), refusals)
    refusals.raise_found()
    return GoldenSet(items=tuple(items), parameters=parameters)


def read_cases(path: Path, content: bytes, prompt: str | None) -> tuple[GoldenItem, ...]:
    """Return the items of a CSV or TSV file of tests, with a column for each variable."""
    refusals = _Refusals()
    tests = list(_read_csv(path, content, refusals))
    items = tuple(_build_items(path, [prompt or "{{ prompt }}"], {}, tests, refusals))
    refusals.raise_found()
    return items


def _resolve(assertion: Any, shared: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of a file
    """Return the shared assertion that a reference names, or else what is given."""
    reference = assertion.get("$ref") if isinstance(assertion, dict) else None
    return assertion if reference is None else shared.get(str(reference).rpartition("/")[2])


def _refuse_code(mapping: Mapping[str, Any], place: str, refusals: _Refusals) -> None:
    for name in sorted(_CODE_KEYS & {key for key, value in mapping.items() if value}):
        refusals.add(place, name, "code is never run")


def _list_tests(path: Path, tests: object, refusals: _Refusals) -> Iterator[dict[str, Any]]:
    for test in tests if isinstance(tests, list) else [tests]:
        if isinstance(test, dict) and "path" not in test:
            yield test
            continue
        reference = test["path"] if isinstance(test, dict) else str(test)
        file = _find_file(path, reference, refusals)
        if file is None:
            continue
        content = _read_file(file)
        if file.suffix in {".csv", ".tsv"}:
            yield from _read_csv(file, content, refusals)
        elif file.suffix == ".jsonl":
            yield from (msgspec.json.decode(line) for line in content.split(b"\n") if line.strip())
        else:
            yield from _list_tests(file, load_yaml(content), refusals)


def _list_prompts(path: Path, prompts: object, refusals: _Refusals) -> Iterator[str]:
    """Yield the templates, of which those in JSON or YAML are lists of messages."""
    for entry in prompts if isinstance(prompts, list) else [prompts]:
        text = entry.get("raw", entry.get("id")) if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            refusals.add("prompts", str(text)[:100], "write the text of a prompt")
        elif text.startswith(_FILE) or text.endswith((".txt", ".json", ".yaml", ".md")):
            file = _find_file(path, text, refusals)
            if file is not None:
                content = _read_file(file).decode()
                yield from content.split("\n---\n") if file.suffix == ".txt" else [content]
        else:
            yield text


def _find_file(path: Path, reference: str, refusals: _Refusals) -> Path | None:
    """Return a file of text in the folder of `path` or below; None if it is refused."""
    name = reference.removeprefix(_FILE)
    file = (path.parent / name).resolve()
    allowed = {".csv", ".tsv", ".json", ".jsonl", ".md", ".txt", ".yaml", ".yml"}
    if "://" in name or not file.is_relative_to(path.parent.resolve()):
        refusals.add("file", reference, "it lies outside the folder of the set")
    elif file.suffix not in allowed:
        refusals.add("file", reference, "code is never run, and patterns of files are not resolved")
    elif not file.is_file():
        refusals.add("file", reference, "there is no such file")
    else:
        return file
    return None


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_SET_BYTES + 1)
    if len(content) > MAX_SET_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_SET_BYTES:,} bytes")
    return content


def _read_csv(path: Path, content: bytes, refusals: _Refusals) -> Iterator[dict[str, Any]]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=delimiter)
    for number, row in enumerate(rows, 1):
        test: dict[str, Any] = {"vars": {}, "assert": [], "metadata": {}}
        for name, value in row.items():
            if not isinstance(name, str) or value is None:
                raise ValueError(f"{path.name}: row {number} has another number of columns")
            if name.startswith("__expected"):
                if value.strip():
                    test["assert"].append(_read_shorthand(value.strip()))
            elif name.startswith("__metadata:"):
                test["metadata"][name.removeprefix("__metadata:")] = value
            elif name == "__description":
                test["description"] = value
            elif name.startswith("__") and value.strip():
                refusals.add(f"{path.name} row {number}", name, "the column is not supported")
            else:
                test["vars"][name] = value
        yield test


def _read_shorthand(text: str) -> dict[str, Any]:
    """Return the assertion that a cell describes, such as `contains: yes`. Text alone is that of the whole answer."""
    name, separator, value = text.partition(":")
    name, value = name.strip(), value.strip()
    kind = "llm-rubric" if name == "grade" else name
    plain = kind.removeprefix("not-")
    if plain in {"is-json", "is-refusal", "contains-json", "is-valid-openai-tools-call"}:
        return {"type": kind, "value": load_yaml(value.encode()) if value else None}
    if not separator or (
        plain not in ASSERTION_TYPES and not plain.startswith(_CODE_PREFIXES) and plain != "similar"
    ):
        return {"type": "equals", "value": text}
    if plain.endswith(("-any", "-all")):
        cells = next(csv.reader([value], skipinitialspace=True), [])
        return {"type": kind, "value": cells}
    return {"type": kind, "value": value}


def _build_items(
    path: Path,
    templates: list[str],
    default: Mapping[str, Any],
    tests: Iterable[dict[str, Any]],
    refusals: _Refusals,
) -> Iterator[GoldenItem]:
    if not templates:
        raise ValueError("it has no `prompts`; add one, or give --prompt")
    count = 0
    for number, test in enumerate(tests, 1):
        if not isinstance(test, dict):
            raise ValueError(f"test {number} is no mapping")  # noqa: TRY004 - of a file
        place = f"test {number}"
        for part in (test, test.get("options") or {}, default.get("options") or {}):
            _refuse_code(part, place, refusals)
        listed = [*(default.get("assert") or []), *(test.get("assert") or [])]
        known = {**(default.get("vars") or {}), **(test.get("vars") or {})}
        for at, (values, template) in enumerate(
            itertools.product(_expand(path, known, place, refusals), templates), 1
        ):
            count += 1
            if count > MAX_ITEMS:
                raise ValueError(f"it has more than {MAX_ITEMS:,} items; split it")
            assertions = tuple(_read_assertions(listed, values, place, refusals))
            if assertions:
                yield GoldenItem(
                    id=f"{number}" if at == 1 else f"{number}.{at}",
                    messages=_render(template, values, place),
                    assertions=assertions,
                    cluster=str((test.get("metadata") or {}).get("cluster", f"test {number}"))[
                        :200
                    ],
                )
            elif not listed:
                refusals.add(place, "assert", "a test needs an assertion")


def _expand(
    path: Path, variables: Mapping[str, Any], place: str, refusals: _Refusals
) -> Iterator[dict[str, Any]]:
    """Yield the values of variables. A list of texts stands for one test with each."""
    options = []
    for name, value in variables.items():
        if isinstance(value, str) and value.startswith(_FILE):
            file = _find_file(path, value, refusals)
            options.append([(name, "" if file is None else _read_file(file).decode())])
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            options.append([(name, each) for each in value])
        else:
            options.append([(name, value)])
    for count, chosen in enumerate(itertools.product(*options)):
        if count >= MAX_ITEMS:
            raise ValueError(f"{place}: its variables make more than {MAX_ITEMS:,} items")
        yield dict(chosen)


def _read_assertions(
    listed: list[Any], values: Mapping[str, Any], place: str, refusals: _Refusals
) -> Iterator[Assertion]:
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ValueError(f"{place}: an assertion needs a `type`")  # noqa: TRY004 - of a file
        kind = entry["type"]
        plain = kind.removeprefix("not-")
        _refuse_code(entry, place, refusals)
        value = entry.get("value")
        if plain not in ASSERTION_TYPES:
            is_code = plain.startswith(_CODE_PREFIXES)
            reason = "code is never run" if is_code else "this type is not supported"
            refusals.add(place, kind, reason)
        elif isinstance(value, str) and value.startswith((_FILE, "package:")):
            refusals.add(place, value, "write the value in the set")
        else:
            yield _make_assertion(entry, plain, _fill(value, values, place), place)


def _make_assertion(entry: Mapping[str, Any], kind: str, value: object, place: str) -> Assertion:
    if kind in {"is-json", "contains-json"} and isinstance(value, str):
        value = load_yaml(value.encode())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    elif kind.endswith(("-any", "-all")) and isinstance(value, str):
        value = [each.strip() for each in value.split(",")]
    elif isinstance(value, list):
        value = [each if isinstance(each, str) else str(each) for each in value]
    fields = {
        "type": kind,
        "is_negated": entry["type"] != kind,
        "value": value,
        "threshold": entry.get("threshold"),
        "weight": entry.get("weight", 1.0),
        "metric": str(entry.get("metric") or ""),
    }
    try:
        return msgspec.convert(fields, Assertion, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from error


def _fill(value: object, values: Mapping[str, Any], place: str) -> object:
    """Return the value of an assertion with the values of variables in it."""
    if isinstance(value, str):
        return _render_text(value, values, place) if "{{" in value else value
    if isinstance(value, list):
        return [_fill(each, values, place) for each in value]
    return value


def _render(template: str, values: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    text = _render_text(template, values, place)
    if text.lstrip().startswith(("[", "- role:")):
        try:
            messages = load_yaml(text.encode())
        except ValueError:
            messages = None
        if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
            return messages
    return [{"role": "user", "content": text}]


def _render_text(template: str, values: Mapping[str, Any], place: str) -> str:
    try:
        compiled = compile_prompt(msgspec.json.encode(PromptContent(text=template)).decode())
        known = {name: value for name, value in values.items() if name in compiled.variables}
        return compiled.render(known).text or ""
    except PromptError as error:
        raise ValueError(f"{place}: the template {template[:60]!r}: {error}") from error


def _read_parameters(providers: object, refusals: _Refusals) -> dict[str, Any]:
    """Return the parameters of the first provider. Its model is not used: `--model` names one."""
    first = providers[0] if isinstance(providers, list) and providers else providers
    if isinstance(first, str) and first.startswith((_FILE, "exec:", "python:", "webhook:")):
        refusals.add("providers", first, "code is never run; name a model")
    config = first.get("config") if isinstance(first, dict) else None
    if not isinstance(config, dict):
        return {}
    for name in sorted({"functions", "function_call"} & config.keys()):
        refusals.add("providers", name, "use `tools` and `tool_choice`")
    parameters = {name: config[name] for name in sorted(PARAMETERS & config.keys())}
    for value in parameters.values():
        if isinstance(value, str) and value.startswith(_FILE):
            refusals.add("providers", value, "write the value in the set")
    return parameters
