"""Settings files: overlays merge, errors name file and line, and no file exhausts time or memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy.settings import (
    MAX_SETTINGS_BYTES,
    SettingError,
    SettingsDocument,
    dump_yaml,
    is_secret_name,
    is_secret_value,
    parse_size,
)


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    size: int = 1
    labels: dict[str, int] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    items: list[Item] = []
    numbers: list[int] = []
    port: int = 80
    api_key: int | None = None


def read(tmp_path: Path, *contents: str) -> Settings:
    paths = [tmp_path / f"{index}.yaml" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return SettingsDocument.read(paths).decode(Settings)


@pytest.mark.parametrize(
    ("base", "overlay", "expected"),
    [
        ("port: 1", "numbers: [2]", Settings(port=1, numbers=[2])),
        ("port: 1", "port: null", Settings()),
        ("numbers: [1, 2]", "numbers: [3]", Settings(numbers=[3])),
        ("port: 1", "# nothing", Settings(port=1)),
        (
            "items: [{name: a, size: 2, labels: {x: 1}}, {name: b}]",
            "items: [{name: c}, {name: a, labels: {y: 2}}]",
            Settings(
                items=[
                    Item(name="a", size=2, labels={"x": 1, "y": 2}),
                    Item(name="b"),
                    Item(name="c"),
                ]
            ),
        ),
        (
            "items: [{name: a, size: 5}]",
            "items: [{name: a, size: null}]",
            Settings(items=[Item(name="a")]),
        ),
        (
            "items: [&a {name: a, size: 5}, {<<: *a, name: b}]",
            "items: [{name: a, size: 6}]",
            Settings(items=[Item(name="a", size=6), Item(name="b", size=5)]),
        ),
    ],
)
def test_overlay_overrides_settings_that_it_names(
    tmp_path: Path, base: str, overlay: str, expected: Settings
) -> None:
    assert read(tmp_path, base, overlay) == expected


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (["port: 1", "\nport: x"], "1.yaml: line 2: Expected a whole number - at `$.port`, but it is 'x'"),
        (["port: x", "numbers: [1]"], "0.yaml: line 1: Expected a whole number - at `$.port`, but it is 'x'"),
        (
            ["items: [{name: a, labels: {x: 1}}]", "items:\n- name: a\n  labels: {y: true}"],
            "1.yaml: line 3: Expected a whole number - at `$.items[0].labels.y`, but it is True",
        ),
        (
            ["items: [{name: a}]", "items: [{name: a, sice: 1}]"],
            "1.yaml: line 1: Object contains unknown field `sice` - at `$.items[0]`; did you mean `size`?",
        ),
        (["port: 1", "prot: null"], "1.yaml: line 1: Object contains unknown field `prot`; did you mean `port`?"),
        (["api_key: abc"], "0.yaml: line 1: Expected a whole number or null, got text - at `$.api_key`"),
    ],
)  # fmt: skip
def test_error_names_file_line_and_value_but_no_secret(
    tmp_path: Path, contents: list[str], message: str
) -> None:
    with pytest.raises(SettingError) as error:
        read(tmp_path, *contents)
    assert str(error.value).removeprefix(f"{tmp_path}/") == message


def test_plain_scalars_are_those_of_yaml_1_2_and_are_written_back(tmp_path: Path) -> None:
    path = tmp_path / "scalars.yaml"
    path.write_text("[1e3, 1_000, 010, 0x10, 0o10, 10:20, off, 2024-01-01, .5, .inf, ~, true]")
    values = SettingsDocument.read([path]).decode(list[Any])
    expected = [1e3, 1000, 10, 16, 8, "10:20", "off", "2024-01-01", 0.5, math.inf, None, True]
    assert values == expected
    texts = [
        "1e3",
        "1_000",
        "010",
        "0x10",
        "10:20",
        "off",
        "2024-01-01",
        ".inf",
        "null",
        "true",
        "=",
        "<<",
        "~",
    ]
    for value in (values, texts):
        again = SettingsDocument.parse(dump_yaml(value).encode(), "again").decode(list[Any])
        assert again == value


def multiply(line: str) -> bytes:
    """Return mappings of which each contains the one before nine times."""
    lines = [line.format(i, ", ".join([f"*k{i - 1}"] * 9)) for i in range(1, 15)]
    return "\n".join(["k0: &k0 {x: 1}", *lines]).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(multiply("k{0}: &k{0} [{1}]"), "more than 200,000 values", id="aliases"),
        pytest.param(
            multiply("k{0}: &k{0} {{<<: [{1}]}}"), "more than 200,000 values", id="merge-keys"
        ),
        pytest.param(b"items: &a [*a]", "the alias in line 1 contains itself", id="cycle"),
        pytest.param(b"items: " + b"[" * 100_000, "nested too deeply", id="flow-lists"),
        pytest.param(b"- " * 100_000, "nested too deeply", id="block-lists"),
        pytest.param(b"#" * MAX_SETTINGS_BYTES + b"\n", "larger than 4 MiB", id="huge"),
        pytest.param(
            b"[" + b"a," * 250_000 + b"]",
            "more than 200,000 values",
            id="many-values",
            marks=pytest.mark.exhaustive,  # takes seconds
        ),
        (b"port: !!python/object/apply:os.system [true]", "python/object/apply:os.system"),
        (b"port: !!timestamp x", "timestamp"),
        (b"items: !!set {a}", "set"),
        (b"port: !!int x", "'x' is not a valid int"),
        (b"port: !!bool x", "'x' is not a valid bool"),
        (b"port: " + b"9" * 5000, "is not a valid int"),
        (b"1: x", "the key '1' in line 1 is not text. Quote it."),
        (b"{[a]: b}", "the key in line 1 is not text"),
        (b"port: \xff", "unacceptable character"),
        (b"port: \x00", "unacceptable character"),
        (b"port: 1\n---\nport: 2", "expected a single document"),
        (b"port: *x", "undefined alias"),
        (b"- a", "Expected a mapping, got a list"),
    ],
    ids=repr,
)
def test_malicious_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*fleet\.yaml: ") as error:
        SettingsDocument.read([path]).decode(Settings)
    assert problem in str(error.value)


def test_secrets_are_recognised_by_name_and_shape() -> None:
    secret = ("HF_TOKEN", "api_key", "api-key", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")
    public = ("max_step_tokens", "tokenizer", "key_header", "monkey")
    assert [name for name in (*secret, *public) if is_secret_name(name)] == [*secret]
    shaped = ("sk-" + "a1" * 20, "hf_" + "Ab" * 17, "-----BEGIN RSA PRIVATE KEY-----")
    assert [value for value in (*shaped, "sk-model") if is_secret_value(value)] == [*shaped]


@pytest.mark.parametrize(
    ("size", "expected"), [("1GiB", 2**30), ("1.5 kB", 1500), (7, 7), ("2m", 2_000_000)]
)
def test_size_has_decimal_and_binary_units(size: Any, expected: int) -> None:  # noqa: ANN401
    assert parse_size(size) == expected
