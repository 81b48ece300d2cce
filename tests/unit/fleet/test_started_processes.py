"""No value that an operator sends over HTTP gives a process an argument or a variable that it may not have.

Random values of all texts of a declaration, and settings of other pools, go every way in: a new declaration, a rollback
to a revision that has them, a scaling. What is accepted is launched as each environment does it.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from tests.support.kubernetes_cluster import expand

from argosy.deployment import (
    BUILT_IN_ENGINES,
    FleetConfig,
    FleetControl,
    PoolConfig,
    apply_declaration,
    dump_fleet,
    parse_fleet,
)
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.launchers import LaunchSpec
from argosy.fleet.launchers.kubernetes_objects import build_deployment
from argosy.fleet.launchers.local_start import fill_command
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.store import ConflictError, FleetRevision, open_memory_store

IN_FORCE = """
fleet: demo
models:
- {name: chat, source: owner/chat, revision: main, aliases: [other]}
- {name: code, source: /models/code, fallback_models: [chat]}
- {name: stored, source: 'https://models.example.com/a', replicas: [{url: 'http://10.0.0.1:80', api_key_env: KEY}]}
engines:
  own:
    command: [serve, '{model}', '--name={served_name}', --port, '{port}']
    optional_arguments: [[--rev, '{revision}']]
  trusting: {command: [serve, --Trust-Remote-Code=true, '{model}', --port, '{port}']}
pools:
- {name: local, model: chat, options: {max_seqs: 4, tool_format: none}, environment: {A: '1'}}
- {name: vllm, model: code, engine: vllm, launcher: kubernetes, image: 'registry/vllm:1',
   environment: {TOKEN: {env: TOKEN}, B: '$(POD_IP)'}, options: {trust-remote-code: true, max-model-len: 4096},
   labels: {disk: ssd}, zones: [a]}
- {name: sglang, model: chat, engine: sglang, launcher: ray, custom_resources: {board: 1}}
- {name: llama, model: code, engine: llama-cpp}
- {name: own, model: chat, engine: own, launcher: kubernetes, image: 'registry/own:1', memory: 16GiB}
- {name: trusting, model: code, engine: trusting}
kubernetes: {secret_name: tokens, service_account: plain}
auth: {mode: required}
store: {url: 'sqlite:///argosy.db'}
"""
OLD = parse_fleet(IN_FORCE)
IN_FORCE_JSON = dump_fleet(OLD, "json").encode()
SECRETS = {"TOKEN": "hidden-by-the-controller"}
POD_IP = "10.1.2.3"
ITEM, KEY = "[]", "{}"
"""Steps of a path: an item of a list or a mapping, and the key of a mapping."""
ATOMS = [
    *("-", "--", "--chat-template=/etc/passwd", "-x", "trust_remote_code", "trust", "chat-template", "hos", "port"),
    *("$(POD_IP)", "$(TOKEN)", "$$(TOKEN)", "$", "`id`", "{port}", "{socket}", "{name}", "{model}", "{", "}", "%s"),
    *(" ", "\n", "\0", "\x1b[2J", "\x7f", "\x9b", "\u2028", "\u202e", "'", '"', "\\", ";", "=", ",", ":", "/", ".."),
    *("owner/other", "chat", "code", "own", "vllm", "sglang", "trusting", "argosy", "kubernetes", "local", "main"),
    *("/etc/passwd", "~", "./x", "ftp://10.0.0.1/x", "file:///etc/passwd", "https://models.example.com/b", "a", "é"),
    *("https://models.example.com@evil.example.com/", "HTTPS://models.example.com/a", "sha256:", "00:30", "a" * 3000),
]  # fmt: skip


def find_texts(kind: inspect.Type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all texts that a type contains, and of all values of any type."""
    match kind:
        case inspect.Metadata():
            yield from find_texts(kind.type, path)
        case inspect.StructType():
            for field in kind.fields:
                yield from find_texts(field.type, (*path, field.encode_name))
        case inspect.ListType() | inspect.VarTupleType() | inspect.CollectionType():
            yield from find_texts(kind.item_type, (*path, ITEM))
        case inspect.DictType():
            yield from find_texts(kind.key_type, (*path, KEY))
            yield from find_texts(kind.value_type, (*path, ITEM))
        case inspect.UnionType():
            for each in kind.types:
                yield from find_texts(each, path)
        case inspect.StrType() | inspect.AnyType() | inspect.LiteralType():
            yield path


PATHS = sorted(set(find_texts(inspect.type_info(FleetConfig))))
COMMAND_PATHS = [
    path
    for path in PATHS
    if path[0] in {"models", "pools"} and len(path) <= 4 and path[-1] != "timezone"
]
COPIED = ["model", "engine", "launcher", "image", "environment", "options", "memory"]
OPTIONS = [
    "max_seqs",
    "tp",
    "hos",
    "po",
    "trust",
    "trust-remote",
    "chat",
    "Host",
    "x",
    "tool_format",
    "chat_template",
]
DOCUMENT: dict[str, Any] = yaml.safe_load(IN_FORCE)


def draw_text(random: Random) -> str:
    if random.random() < 0.1:
        return "".join(
            chr(random.choice([random.randrange(32, 127), random.randrange(0xD800)]))
            for _ in range(4)
        )
    return "".join(random.choices(ATOMS, k=random.randint(1, 2)))


def draw_value(random: Random) -> Any:  # noqa: ANN401 - of any type
    kinds: list[Callable[[], Any]] = [
        lambda: draw_text(random),
        lambda: random.randint(-9, 9),
        lambda: random.random() * 10,
        lambda: random.random() < 0.5,
        lambda: [draw_text(random)],
        lambda: {draw_text(random): draw_text(random)},
    ]
    return random.choice(kinds)()


def put(node: Any, path: tuple[str, ...], value: Any, random: Random) -> Any:  # noqa: ANN401 - any document
    """Return a document with a value at a path, in an item that is there or in a new one."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if step in {ITEM, KEY} and not isinstance(node, dict):
        items = list(node) if isinstance(node, list) else []
        index = random.randint(0, len(items))
        before = items[index] if index < len(items) else None
        return [*items[:index], put(before, rest, value, random), *items[index + 1 :]]
    fields = dict(node) if isinstance(node, dict) else {}
    if step == KEY:
        return fields | {str(value): fields.get(next(iter(fields), ""), "1")}
    name = random.choice(sorted(fields)) if step == ITEM and fields else step
    return fields | {"x" if name == ITEM else name: put(fields.get(name), rest, value, random)}


def build_document(random: Random) -> dict[str, Any]:
    """Return the declaration in force with other texts, and with settings of one pool or model in another one."""
    document = copy.deepcopy(DOCUMENT)
    for change in random.choices(["text", "model", "copy", "option"], k=random.randint(1, 2)):
        pools = [each for each in document["pools"] if isinstance(each, dict)]
        pool = random.choice([*pools, {"name": "new", "model": "chat"}])
        if change == "text":
            path = random.choice(random.choice([PATHS, COMMAND_PATHS]))
            document = put(
                document, path, (draw_value if path[-1] == ITEM else draw_text)(random), random
            )
        elif change == "model":
            model = random.choice([each for each in document["models"] if isinstance(each, dict)])
            before = model.get("name")
            model[random.choice(["source", "source", "revision", "name"])] = draw_text(random)
            for each in pools:
                each["model"] = model["name"] if each.get("model") == before else each.get("model")
        elif change == "option":
            name = random.choice([*OPTIONS, draw_text(random)])
            value = random.choice([random.randint(-9, 9), draw_value(random)])
            kept = pool.get("options")
            pool["options"] = {**(kept if isinstance(kept, dict) else {}), name: value}
        else:
            origins = {
                name: random.choice(DOCUMENT["pools"])
                for name in random.sample(COPIED, random.randint(1, 4))
            }
            copied = {name: origin[name] for name, origin in origins.items() if name in origin}
            document["pools"] = [each for each in pools if each is not pool] + [pool | copied]
    return document


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetControl]:
    store = open_memory_store()
    yield FleetControl("demo", store.fleets)
    store.close()


def send(fleet: FleetControl, document: dict[str, Any], way: str) -> FleetConfig | None:
    """Let an operator put a declaration in force, and return the one in force after it; None if it was refused."""
    text, number = msgspec.json.encode(document).decode(), 0
    if way == "rollback":
        try:
            number = declare(fleet, parse_fleet(text))
        except ValueError:
            return None
    latest = fleet.store.latest_revision("demo")
    if latest is None or latest.declaration != IN_FORCE_JSON:
        declare(fleet, OLD)
        latest = fleet.store.latest_revision("demo")
    assert latest is not None
    try:
        if way == "rollback":
            fleet.roll_back(number, None, "", "key:1")
        else:
            fleet.apply_change(text, latest.number, "", "key:1")
        fleet.scale("local", 3, "", "key:1")
    except (ValueError, ConflictError):
        after = fleet.store.latest_revision("demo")
        assert after is not None
        if after.number == latest.number:
            return None
    return parse_fleet(fleet.read_declaration(None).declaration)


def declare(fleet: FleetControl, config: FleetConfig) -> int:
    """Put a declaration in force from the command line, and return the number of its revision."""
    latest = fleet.store.latest_revision("demo")
    return apply_declaration(fleet.store, "demo", config, latest, author="cli", reason="").number


@settings(max_examples=settings().max_examples * 3 // 5)
@given(random=st.randoms(use_true_random=True), way=st.sampled_from(["apply", "rollback"]))
def test_no_value_becomes_an_argument_or_a_variable_that_an_operator_may_not_set(
    fleet: FleetControl, random: Random, way: str
) -> None:
    config = send(fleet, build_document(random), way)
    event(f"{way} {'accepted' if config else 'refused'}")
    if config is None:
        return
    assert (config.engines, config.kubernetes, config.ray) == (OLD.engines, OLD.kubernetes, OLD.ray)
    revision, *earlier = fleet.store.list_revisions("demo", 3)
    declared = DeclaredFleet(revision, [revision, *earlier], Path("/state"), "sqlite://")
    for pool in config.pools:
        assert any(takes_from(pool, each) for each in OLD.pools)
        check_options(pool)
        check_process(declared, config, pool, revision)
    # If the gate rolls a new version back, the earlier one starts again.
    before = next(each for each in earlier if each.declaration == IN_FORCE_JSON)
    for pool in OLD.pools:
        check_process(declared, OLD, pool, before)


def check_process(
    declared: DeclaredFleet, config: FleetConfig, pool: PoolConfig, revision: FleetRevision
) -> None:
    """Check the arguments and variables of a version of a pool, if it can be launched here."""
    needs_store = (config.model_of(pool).source or "").startswith("sha256:")
    needs_variables = pool.secret_references and pool.launcher != "kubernetes"
    if needs_store or needs_variables:
        return
    spec = declared.launch_spec(pool.name, revision.generations[pool.name].generation, 0)
    arguments, variables = start(spec, pool)
    assert arguments == expected_arguments(config, pool, spec.name)
    assert not [each for each in arguments if SECRETS["TOKEN"] in each]
    assert variables.keys() <= {*pool.environment, "POD_IP", "HOME", "XDG_CACHE_HOME", "USER"}
    for name, value in pool.environment.items():
        assert variables[name] == (value if isinstance(value, str) else SECRETS["TOKEN"])


def takes_from(pool: PoolConfig, origin: PoolConfig) -> bool:
    """Return whether all that a pool may not choose is that of one pool in force, or nothing."""
    same = msgspec.structs.replace(pool, name=origin.name) == origin
    is_known = pool.name == origin.name
    return same or (
        pool.launcher == origin.launcher
        and pool.image in {origin.image, origin.image if is_known else None}
        and pool.environment in [origin.environment, origin.environment if is_known else {}]
    )


def check_options(pool: PoolConfig) -> None:
    before = OLD.find_pool(pool.name)
    kept = before.options if before is not None and before.engine == pool.engine else {}
    for name, value in pool.options.items():
        if name in kept and json.dumps(kept[name]) == json.dumps(value):
            continue
        plain = name.lower().replace("-", "_")
        assert not re.match(r"trust(_r\w*)?$|chat_template$|generation_config$|port?$", plain)
        assert pool.engine in OLD.engines or not plain.startswith("hos")
        assert pool.engine == "argosy" or (isinstance(value, (int, float)) and value is not True)


def start(spec: LaunchSpec, pool: PoolConfig) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the declared variables of a process as its environment starts it."""
    if pool.launcher != "kubernetes":
        record = LaunchRecord(
            **spec.identity,
            attempt=1,
            started_at=0.0,
            url=None,
            port=8001,
            socket="/run/x",
            gpus=(),
            cpus=(),
        )
        return list(fill_command(spec.command, record, "127.0.0.1")), dict(spec.environment)
    pod = build_deployment(spec, "demo")["spec"]["template"]["spec"]
    variables = {"POD_IP": POD_IP} | SECRETS
    values = {
        each["name"]: expand(each["value"], variables)
        if "value" in each
        else variables[each["valueFrom"].get("secretKeyRef", {"key": "POD_IP"})["key"]]
        for each in pod["containers"][0]["env"]
    }
    return [expand(each, values) for each in pod["containers"][0]["command"]], values


def expected_arguments(config: FleetConfig, pool: PoolConfig, name: str) -> list[str]:
    """Return the arguments of the engine's template with each value as it is, and those of the pool's options."""
    engine, model = {**OLD.engines, **BUILT_IN_ENGINES}[pool.engine], config.model_of(pool)
    is_path = (model.source or "").startswith("/")
    on_kubernetes = pool.launcher == "kubernetes"
    values = {
        "host": POD_IP if on_kubernetes else "127.0.0.1",
        "port": "8000" if on_kubernetes else "8001",
        "socket": "/run/x",
        "name": name,
        "model": model.source,
        "model_path": model.source if is_path else None,
        "hub_model": None if is_path else model.source,
        "revision": model.revision,
        "served_name": model.name,
        "drain_deadline_s": str(math.ceil(pool.drain_deadline_s)),
    }
    listens = engine.socket_arguments if pool.launcher == "local" else ()
    arguments: list[str] = []
    for group in (engine.command, *engine.optional_arguments, listens or engine.port_arguments):
        names = {each for argument in group for each in re.findall(r"\{(\w+)\}", argument)}
        if all(values[each] is not None for each in names):
            arguments += [
                re.sub(r"\{(\w+)\}", lambda match: values[match[1]] or "", each) for each in group
            ]
    if pool.engine == "argosy":
        if pool.launcher == "local":
            arguments[:1] = [sys.executable, "-P", "-m", "argosy.cli"]
        given: dict[str, Any] = {
            "model": model.source,
            "revision": model.revision,
            "digest": model.digest,
        }
        given |= {"served_model_name": [model.name], "drain_deadline": pool.drain_deadline_s}
        given |= dict(sorted(pool.options.items()))
        known = {key: value for key, value in given.items() if value is not None}
        return [*arguments, "--options", msgspec.json.encode(known).decode()]
    for option, value in sorted(pool.options.items()):
        flag = option.replace("_", "-")
        if value is False:
            arguments += [f"--no-{flag}"] * (engine.false_options == "no-prefix")
        else:
            arguments += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return arguments
