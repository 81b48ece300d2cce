"""Contradictions, impossible sizes, dead references and secrets are refused with their path and a remedy.

So is a declaration sent to a gateway that changes what only the command line may change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from tests.support.small_models import write_small_model
from tools.settings_docs import struct_in

import argosy
from argosy.deployment import (
    ExpectedText,
    FleetConfig,
    FleetControl,
    apply_declaration,
    load_config,
    load_fleet,
    parse_fleet,
    parse_remote_change,
)
from argosy.model_store import (
    compute_manifest,
    list_model_files,
    open_model_store,
    pull_model,
)
from argosy.settings import changed_by
from argosy.store import open_memory_store

FLEET = "models: [{name: chat, source: argosy-mini}]\npools: [{name: chat, model: chat, %s}]\n"
GATEWAY = "models: [{name: m, replicas: [{url: 'http://a'}]}]\n"
SCALED = "autoscaling: {mode: on}, max_replicas: 3, "
SCHEDULED = (
    "min_replicas: 1, max_replicas: 3, "
    "autoscaling: {{mode: on, schedules: [{{min_replicas: {}, start: 08:00, end: {}}}]}}"
)
SECRET_HEADER = (
    FLEET.replace("mini}", "mini, replicas: [{url: 'http://a', headers: {Authorization: ':pw@'}}]}")
    % "replicas: 1"
)
DIGEST = "sha256:" + "0" * 64
QUALITY_REPORT: dict[str, Any] = {
    "base_digest": DIGEST,
    "arithmetic": "a",
    "recipe": "w8a8",
    "method": "gptq",
    "calibration_tokens": 1000,
    "data_digest": DIGEST,
    "tokens": 100,
    "base_perplexity": 20.0,
    "perplexity": 20.1,
    "mean_kl": 0.01,
    "p99_kl": 0.1,
    "max_kl": 0.2,
    "same_top": 0.99,
    "same_top5": 0.98,
    "greedy_prompts": 1,
    "greedy_tokens": 12.5,
    "max_greedy_tokens": 128,
    "limits": {},
}


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("model: chta", "pools[0].model: no model has the name 'chta'. Did you mean 'chat'?"),
        ("engine: vlm", "pools[0].engine: no engine has the name 'vlm'. Did you mean 'vllm'?"),
        ("replicas: 1, min_replicas: 1", "pools[0].replicas: it contradicts min_replicas"),
        ("min_replicas: 1", "pools[0].min_replicas: it needs max_replicas"),
        ("max_replicas: 1", "pools[0].max_replicas: it needs min_replicas"),
        ("autoscaling: {mode: on}", "pools[0].autoscaling: it has nothing to decide"),
        (SCALED + "min_replicas: 2, replicas: 1", "pools[0].replicas: it is not between min_replicas (2)"),
        (SCALED + "min_replicas: 1, engine: vllm", "do not report what they can serve. Set `tokens_per_s`"),
        (SCALED + "min_replicas: 1}, {name: b, model: chat", "the pool 'b' also serves the model 'chat'"),
        ("rollout: {}}, {name: b, model: chat", "pools[0].rollout: the pool 'b' also serves the model 'chat'"),
        ("rollout: {strategy: rolling, steps: [5%]}", "pools[0].rollout: strategy rolling has no steps"),
        ("rollout: {steps: [50%, 0.05]}", "pools[0].rollout: shares of the steps must not fall"),
        ("rollout: {steps: [0%]}", "pools[0].rollout: share of a step must be between 0 and 1"),
        ("rollout: {gate: {metrics: {ttft: {margin: 1}}}}", "pools[0].rollout: margin and tight_margin must be"),
        (r"rollout: {prompts: [{prompt: a, expect: {regex: '(a)\1'}}]}", "regex is invalid"),
        ("rollout: {max_surge: 1}", "$.pools[0].rollout.max_surge"),
        ("rollout: {prompts: [{max_tokens: 1}]}", "a pinned prompt needs either `prompt` or `messages`"),
        ("autoscaling: {schedules: [{min_replicas: 1, start: 18:00, end: 20:00}]}", "Set `mode` to on, or remove them"),
        (SCHEDULED.format(1, "18:00, timezone: Mars"), "schedules[0].timezone: Unknown time zone Mars"),
        (SCHEDULED.format(1, "24:00"), "Expected text such as 08:30"),
        (SCHEDULED.format(9, "18:00"), "schedules[0].min_replicas: 9 is more"),
        ("min_replicas: 3, max_replicas: 2", "pools[0].min_replicas: 3 is more than max_replicas (2)"),
        ("max_surge: 0, max_unavailable: 0%", "pools[0].max_surge: with max_unavailable 0 no replica"),
        ("max_unavailable: 101%", "Expected text such as 25%"),
        ("max_unavailable: 0.25", "Expected a whole number or text - at `$.pools[0].max_unavailable`"),
        ("memory: 16 apples", "Expected text such as 64MiB or 16GB"),
        ("memory: 1MiB", "pools[0].memory: '1MiB' is less than any engine needs"),
        ("accelerators: 2", "pools[0].accelerators: the engine argosy uses one GPU"),
        ("launcher: kubernetes", "pools[0].image: the launcher kubernetes needs a container image"),
        ("zones: [a]", "pools[0].zones: the launcher local knows one machine only"),
        ("custom_resources: {board: 1}", "pools[0].custom_resources: the launcher local has none"),
        (
            "launcher: ray, custom_resources: {GPU: 1}",
            "pools[0].custom_resources.GPU: this resource of Ray has a setting of its own. Use `accelerators`",
        ),
        ("launcher: ray, custom_resources: {board: 1.5}", "Write a whole number"),
        ("launcher: ray, zones: [a, a]", "pools[0].zones: a zone is listed twice"),
        ("options: {max_num_seqs: 1}", "`max_num_seqs` - at `$.pools[0].options`; did you mean `max_seqs`?"),
        ("options: {max_seqs: many}", "a whole number - at `$.pools[0].options.max_seqs`, but it is 'many'"),
        ("options: {device: tpu}", "at `$.pools[0].options.device`; write auto, cpu or cuda"),
        ("options: {revision: main}", "options.revision: the fleet sets this option itself. Use models[].revision"),
        ("options: {port: 1}", "pools[0].options.port: the fleet sets this option itself. Remove it"),
        ("options: {device: cuda}", "pools[0].options.device: cuda needs a GPU"),
        ("accelerators: 1, options: {device: cpu}", "pools[0].options.device: cpu leaves the GPU unused"),
        ("options: {--max-seqs: 1}", "Expected text such as max_seqs - at `key` in"),
        ("engine: vllm, options: {served_model_name: x}", "pools[0].options.served_model_name: the fleet sets"),
        ("engine: vllm, options: {por: 1}", "pools[0].options.por: the fleet sets this option itself"),
        ("engine: vllm, options: {x: {y: ['{port}']}}", "pools[0].options.x: {port} stands for what a launcher"),
        ("engine: vllm, options: {api_key: abc}", "pools[0].options.api_key: it looks like a secret"),
        ("engine: vllm, options: {x: .inf}", "pools[0].options.x: inf is not a finite number"),
        ("engine: vllm, options: {x: 18446744073709551616}", "pools[0].options.x: the number has more than 64 bits"),
        ('engine: vllm, options: {x: "a\\0b"}', "pools[0].options.x: it contains a NUL character"),
        ("environment: {HF_TOKEN: abc}", "pools[0].environment.HF_TOKEN: it looks like a secret"),
        ("environment: {X: hf_abcdefghijklmnopqrst}", "pools[0].environment.X: it looks like a secret"),
        ("engine: vllm, options: {x: {y: [sk-abcdefghijklmnopqrstu]}}", "options.x.y[0]: it looks like a secret"),
        ("environment: {X: {}}", "pools[0].environment.X: write either `env` or `file`"),
        ("environment: {X: {env: A, file: /b}}", "pools[0].environment.X: write either `env` or `file`"),
        ("environment: {A-B: x}", "Expected text such as MY_VARIABLE - at `key` in"),
        ("name: gateway", "pools[0].name: the gateways of the controller have this name"),
        ("name: Chat", "Expected text such as chat-1"),
    ],
)  # fmt: skip
def test_invalid_pool_is_refused(pool: str, message: str) -> None:
    key = pool.partition(":")[0]
    head, pools = FLEET.split("\n", 1)
    text = pools.replace(f"{key}: chat, ", "", 1) if key in {"name", "model"} else pools
    with pytest.raises(ValueError, match=r"^the declaration: ") as error:
        parse_fleet(f"{head}\n{text % pool}")
    assert message in str(error.value)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [{name: m}]", "models[0]: nothing serves the model 'm'. Add a pool"),
        ("models: [{name: m, source: x}]", "models[0]: nothing serves the model 'm'. Add a pool"),
        (GATEWAY + "pools: [{name: p, model: m}]", "pools[0].model: the model 'm' has no `source`"),
        (GATEWAY.replace("name: m,", f"name: m, digest: '{DIGEST}',"), "models[0].digest: it belongs to a `source`"),
        (GATEWAY.replace("name: m,", "name: m, source: x, digest: abc,"), "Expected text such as sha256:0"),
        (SECRET_HEADER, "models[0].replicas[0].headers.Authorization: it looks like a secret"),
        (FLEET % "replicas: 1" + "gateways: 2\nuds: /x", "uds: several gateways cannot listen on one socket"),
        (FLEET % "replicas: 1" + "gateways: 2\nport: 65535", "port: 2 gateways do not fit above it"),
        (FLEET % "replicas: 1" + "store: {url: 'postgresql://u:pw@h/d'}", "store.url: it contains a password"),
        (FLEET % "replicas: 1}, {name: chat, model: chat", "pools[1].name: the pool 'chat' is defined twice"),
        (FLEET.replace("mini}", "mini, revision: x}") % "engine: llama-cpp", "cannot load a certain revision"),
        (GATEWAY + "engines: {vllm: {command: ['{port}']}}", "engines.vllm: an engine of this name is built in"),
        (GATEWAY + "engines: {e: {command: [x]}}", "engines.e.command: it has no {port}"),
        (GATEWAY + "engines: {e: {command: ['{prot}']}}", "engines.e: the placeholder {prot} is unknown. Did you"),
        (GATEWAY + "engines: {e: {command: ['{port}', '{revision}']}}", "e.command: {revision} may have no value"),
        (GATEWAY + "engines: {e: {command: ['{port}'], kind: x}}", "at `$.engines.e.kind`; write argosy"),
        ("fleet: x", "Object missing required field `models`"),
    ],
)  # fmt: skip
def test_invalid_fleet_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^the declaration: ") as error:
        parse_fleet(text)
    assert message in str(error.value)
    assert ":pw@" not in str(error.value)


def test_gateway_file_is_a_fleet_that_something_else_runs(tmp_path: Path) -> None:
    path = tmp_path / "My Fleet.yaml"
    path.write_text(GATEWAY + "store: {url: 'postgresql://u:pw@h/d'}")
    config = load_fleet([path])
    assert (config.fleet, config.pools) == ("my-fleet", ())
    assert config.models[0].replicas == load_config(path).models[0].replicas


def test_gateway_without_controller_needs_replicas(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("port: 1\nmodels:\n- name: m")
    with pytest.raises(ValueError, match=r"gateway.yaml: line 3: model 'm' has no replicas. Add"):
        load_config(path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("./m", "{folder}/m"), ("../m.gguf", "{parent}/m.gguf"), ("/m", "/m"), ("owner/m", "owner/m")],
)
def test_relative_source_starts_at_folder_of_its_file(
    tmp_path: Path, source: str, expected: str
) -> None:
    base, overlay = tmp_path / "base.yaml", tmp_path / "production" / "overlay.yaml"
    overlay.parent.mkdir()
    base.write_text(FLEET % "replicas: 1")
    overlay.write_text(f"models: [{{name: chat, source: '{source}'}}]")
    config = load_fleet([base, overlay])
    assert config.fleet == "base"
    folder = overlay.parent.resolve()
    assert config.models[0].source == expected.format(folder=folder, parent=folder.parent)


def test_contradiction_names_file_of_the_setting(tmp_path: Path) -> None:
    base, overlay = tmp_path / "base.yaml", tmp_path / "overlay.yaml"
    base.write_text(FLEET % "replicas: 1")
    overlay.write_text("pools:\n- name: chat\n  memory: 1kB")
    with pytest.raises(ValueError, match=r"overlay\.yaml: line 3: pools\[0\]\.memory: "):
        load_fleet([base, overlay])


@pytest.mark.parametrize(
    ("memory", "sleep", "fits"),
    [("1KiB", "{}", False), ("1GiB", "{}", True), ("1KiB", "null", True)],
)
def test_model_that_exceeds_the_memory_is_refused_by_name(
    memory: str,
    sleep: str,
    fits: bool,
    tmp_path: Path,
) -> None:
    write_small_model(tmp_path / "model", weights=b"x" * 2048)
    file = tmp_path / "fleet.yaml"
    pools = f"pools: [{{name: chat, model: chat, sleep: {sleep}}}]"
    file.write_text(f"models: [{{name: chat, source: ./model}}]\nmodel_memory: {memory}\n{pools}\n")
    if fits:
        assert load_fleet([file]).model_memory == memory
        return
    with pytest.raises(
        ValueError, match=r"model has .* MiB of weights, more than model_memory \(1KiB"
    ) as error:
        load_fleet([file])
    assert str(error.value).startswith(f"{file}: models[0].source: ")


GATED = "models: [{{name: chat, source: {}, quality_gate: required}}]\npools: [{{name: chat, model: chat}}]\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"perplexity": 20.3}, "the perplexity rises by 1.50% (limit 1.00%)"),
        ({"mean_kl": 0.03}, "the mean KL divergence is 0.0300 (limit 0.02)"),
        ({"same_top": 0.9}, "90.00% of the most likely tokens are the same (limit 98.00%)"),
        ({"digest": DIGEST}, f"its quality report is that of another model, {DIGEST}"),
        ({"mean_kl": "low"}, "is no quality report: Expected `float`, got `str`"),
        (None, "it has no quality report"),
    ],
)
@pytest.mark.parametrize("is_stored", [True, False])
def test_required_report_decides_whether_a_version_is_served(
    changes: dict[str, Any] | None,
    problem: str | None,
    is_stored: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "store"))
    model = write_small_model(tmp_path / "model")
    digest = compute_manifest(list_model_files(model)).digest
    if changes is not None:
        report = QUALITY_REPORT | {"digest": digest} | changes
        (model / "argosy-quality.json").write_bytes(msgspec.json.encode(report))
    source = f"./model, digest: '{digest}'"
    if is_stored:
        assert pull_model(open_model_store(), str(model), name="chat").digest == digest
        source = "'store:chat'"
    file = tmp_path / "fleet.yaml"
    file.write_text(GATED.format(source))
    if problem is None:
        assert load_fleet([file]).models[0].digest == digest
        return
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        load_fleet([file])
    assert f"{file}: models[0].quality_gate: " in str(error.value)
    with pytest.raises(ValueError, match="a report belongs to a digest"):
        parse_fleet(GATED.format("./model"))
    if is_stored:
        in_force = parse_fleet(GATED.format(f"'{DIGEST}'"))
        with pytest.raises(ValueError, match=re.escape(problem)):
            parse_remote_change(GATED.format(f"'{digest}'"), "change", in_force)


IN_FORCE = """
fleet: demo
models:
- {name: chat, source: owner/chat}
- {name: code, source: owner/code, replicas: [{url: 'https://api.example.com', api_key_env: KEY}]}
- {name: stored, source: 'https://models.example.com/a'}
engines:
  own: {command: [serve, '{model}', '{port}']}
  trusting: {command: [serve, --Trust-Remote-Code=true, '{model}', '{port}']}
pools:
- {name: chat, model: chat}
- name: code
  model: code
  engine: vllm
  launcher: kubernetes
  image: registry/vllm:1
  environment: {HF_TOKEN: {env: HF_TOKEN}}
  options: {trust-remote-code: true, max-model-len: 4096}
- {name: stored, model: stored}
kubernetes: {secret_name: tokens}
store: {url: 'sqlite:///argosy.db'}
"""


@pytest.fixture
def old() -> FleetConfig:
    return parse_fleet(IN_FORCE)


@pytest.mark.parametrize(
    ("old_text", "new_text", "setting"),
    [
        ("command: [serve,", "command: [sh, -c,", "engines"),
        ("https://api.example.com", "https://evil.example.com", "models[1].replicas"),
        (
            "- {name: chat, source: owner/chat}",
            "- {name: chat, source: ~/chat}",
            "models[0].source",
        ),
        ("{env: HF_TOKEN}", "{file: /etc/passwd}", "pools[1].environment"),
        ("{env: HF_TOKEN}", "{env: AWS_SECRET_ACCESS_KEY}", "pools[1].environment"),
        ("registry/vllm:1", "evil/vllm:1", "pools[1].image"),
        ("launcher: kubernetes", "launcher: ray", "pools[1].launcher"),
        ("true, max-model-len: 4096", "1", "pools[1].options.trust-remote-code"),
        ("4096}", "4096, chat-template: /etc/passwd}", "pools[1].options.chat-template"),
        ("4096}", "4096, enable-x: true}", "pools[1].options.enable-x"),
        ("source: owner/code", "source: evil/code", "pools[1].model"),
        ("model: chat}", "model: chat, options: {trust_remote_code: true}}", "pools[0].options"),
        ("model: chat}", "model: chat, environment: {LD_PRELOAD: /a}}", "pools[0].environment"),
        ("name: chat, model: chat}", "name: new, model: chat, launcher: ray}", "pools[0].launcher"),
        (
            "model: chat}",
            "model: chat}\n- {name: new, model: chat, environment: {HF_TOKEN: {env: HF_TOKEN}}}",
            "pools[1].launcher",
        ),
        ("4096}", "4096, trust: 1}", "pools[1].options.trust"),
        ("secret_name: tokens", "secret_name: others", "kubernetes"),
        ("argosy.db", "other.db", "store"),
        ("fleet: demo", "auth: {mode: disabled}", "auth"),
        ("fleet: demo", "log_content: true", "log_content"),
        (
            "source: owner/chat",
            "source: owner/chat, quality_gate: required",
            "models[0].quality_gate",
        ),
        ("source: owner/chat", "source: 'ftp://10.0.0.1/x'", "models[0].source"),
        ("source: owner/chat", "source: 'https://other.example.com/x'", "models[0].source"),
        (
            "models:\n",
            "models:\n- {name: copy, replicas: [{url: 'https://api.example.com', api_key_env: KEY}]}\n",
            "models[0].replicas",
        ),
        ("model: chat}", "model: chat, engine: trusting}", "pools[0].model"),
        (
            "model: chat}",
            "model: chat}\n- {name: new, model: chat, engine: trusting}",
            "pools[1].model",
        ),
        (
            "source: owner/chat",
            f"source: owner/chat, aliases: {[*map(str, range(1000))]}",
            "models",
        ),
    ],
)
def test_command_line_alone_decides_what_machines_run_read_and_trust(
    old: FleetConfig, old_text: str, new_text: str, setting: str
) -> None:
    changed = IN_FORCE.replace(old_text, new_text)
    assert changed != IN_FORCE
    with pytest.raises(ValueError, match=rf"^sent: line \d+: {re.escape(setting)}"):
        parse_remote_change(changed, "sent", old)


def test_models_pools_and_limits_may_change(old: FleetConfig) -> None:
    changed = IN_FORCE.replace("fleet: demo", "timeouts: {connect_timeout_s: 1}\ngateways: 2")
    changed = changed.replace("source: owner/chat", "source: /models/chat, aliases: [best]")
    changed = changed.replace("max-model-len: 4096", "max-num-seqs: 8")
    changed = changed.replace(
        "pools:\n- {name: chat,",
        "pools:\n- {name: second, model: chat, launcher: kubernetes, image: 'registry/vllm:1'}\n"
        "- {name: chat, replicas: 3, options: {max_seqs: 4, quantize: int8},",
    )
    config = parse_remote_change(changed, "sent", old)
    assert (config.fleet, config.gateways, config.models[0].source) == ("demo", 2, "/models/chat")
    assert [pool.name for pool in config.pools] == ["second", "chat", "code", "stored"]


def test_fleet_without_pools_gets_none_that_it_never_had(old: FleetConfig) -> None:
    down = parse_fleet("models: [{name: chat, source: owner/chat}]\nfleet: demo\ngateways: 0")
    with pytest.raises(ValueError, match=r"pools\[0\].launcher"):
        parse_remote_change(
            "models: [{name: chat, source: a/b}]\ngateways: 0\npools: [{name: a, model: chat}]",
            "sent",
            down,
        )
    emptied = "models: [{name: chat, source: owner/chat}]\ngateways: 0\n"
    with pytest.raises(ValueError, match="store: it decides"):
        parse_remote_change(emptied, "sent", old)


@pytest.mark.parametrize(
    ("regex", "text", "matches"),
    [
        (r"4|four", "It is four.", True),
        (r"^(?:[\s\S]+)+\x00$", "a" * 200, False),  # backtracking would take ages
        (r"b$", "half a \ud83d pair, b", True),
    ],
)
def test_expected_answer_is_matched_in_linear_time(regex: str, text: str, matches: bool) -> None:
    assert ExpectedText(regex=regex).matches(text) is matches


@pytest.mark.parametrize("text", ["--chat-template=/etc/passwd", "-x", "chat\n"])
@pytest.mark.parametrize("setting", ["source", "name"])
def test_value_of_a_command_cannot_become_an_option(setting: str, text: str) -> None:
    model = {"name": "chat", "source": "owner/chat", setting: text}
    with pytest.raises(ValueError, match=f"models.*{setting}"):
        parse_fleet(msgspec.json.encode({"fleet": "demo", "models": [model]}))


def test_models_may_come_from_an_address_that_is_in_use(old: FleetConfig) -> None:
    changed = IN_FORCE.replace("source: owner/chat", "source: 'https://models.example.com/b'")
    config = parse_remote_change(changed, "sent", old)
    assert config.models[0].source == "https://models.example.com/b"


def test_each_setting_says_who_may_change_it() -> None:
    def find_unmarked(struct: type[msgspec.Struct]) -> set[tuple[str, str]]:
        marks, hints = changed_by(struct), get_type_hints(struct, include_extras=True)
        names = {field.name for field in msgspec.structs.fields(struct)}
        found = {(struct.__name__, name) for name in names - marks.keys()}
        for name in names & marks.keys():
            inner = struct_in(hints[name]) if marks[name] == "operator" else None
            found |= set() if inner is None else find_unmarked(inner)
        return found

    assert find_unmarked(FleetConfig) == set()


def test_no_way_back_changes_what_only_the_command_line_may_change() -> None:
    store = open_memory_store()
    declared = {True: IN_FORCE + "log_content: true\n", False: IN_FORCE}
    for logs in (False, True, False):
        config = parse_fleet(declared[logs])
        latest = store.fleets.latest_revision("demo")
        apply_declaration(store.fleets, "demo", config, latest, author="cli", reason="")
    fleet = FleetControl("demo", store.fleets)
    with pytest.raises(ValueError, match="log_content: it decides"):
        fleet.plan_rollback(2)
    with pytest.raises(ValueError, match="log_content: it decides"):
        fleet.roll_back(2, None, "", "key:1")
    assert fleet.scale("chat", 2, "", "key:1") == 4
    assert fleet.roll_back(3, None, "", "key:1") == 5
    store.close()


def test_patterns_of_types_match_to_the_end() -> None:
    """`$` alone also matches before a line break at the end."""
    for path in Path(argosy.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "pattern":
                assert not ast.unparse(node.value).rstrip("\"'").endswith("$"), path


def test_patterns_of_settings_have_examples_for_their_errors() -> None:
    def find_patterns(part: object) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict) and isinstance(part.get("pattern"), str):
            yield part
        for inner in (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        ):
            yield from find_patterns(inner)

    found = list(find_patterns(msgspec.json.schema(FleetConfig)))
    assert len(found) > 20
    for part in found:
        assert part.get("examples"), part
        assert all(re.search(part["pattern"], text) for text in part["examples"]), part
