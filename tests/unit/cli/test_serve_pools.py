"""Pools of `argosy serve`: its options reach the replicas, and its groups of replicas become pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import typer
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from argosy.cli.replica_options import with_replica_options
from argosy.cli.serve_pools import ServedModel, declare_fleet, plan_pools
from argosy.deployment import dump_fleet, parse_fleet
from argosy.engine import build_replica_settings
from argosy.fleet import ReplicaGroup

MODEL = ServedModel(("chat", "other name"), "/models/a folder")
EMBEDDING = ServedModel(("minilm",), "/models/minilm")


@with_replica_options()
def command(options: Mapping[str, Any], *, context: typer.Context) -> None:
    context.obj.append(options)


APP = typer.Typer()
APP.command()(command)
COMMAND = typer.main.get_command(APP)


def parse_options(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the options that a command with those of a replica gets."""
    parsed: list[Mapping[str, Any]] = []
    COMMAND(list(arguments), standalone_mode=False, obj=parsed)
    return parsed[0]


def options_of(command: Sequence[str]) -> dict[str, Any]:
    """Return the options that a replica's command line passes as one document."""
    document: dict[str, Any] = msgspec.json.decode(command[command.index("--options") + 1])
    return document


OPTIONS = {
    "--dtype": st.sampled_from(["auto", "float32"]),
    "--generation-config": st.sampled_from(["none", "/a folder"]),
    "--kv-memory": st.sampled_from(["64MiB", "123456789"]),
    "--label": st.sampled_from(["rack=a", "host=b c"]),
    "--max-seqs": st.integers(1, 1000).map(str),
    "--speculative-config": st.sampled_from(['{"method": "ngram", "num_speculative_tokens": 4}']),
    "--override-generation-config": st.sampled_from(['{"temperature": 0.6, "top_p": null}']),
    "--request-timeout": st.floats(0.001, 1e6).map(str),
    "--zone": st.sampled_from(["", "zone-a"]),
}
FLAGS = st.sampled_from(["--no-prefix-cache", "--prefix-cache", "--vllm-metrics"])


@given(
    options=st.lists(
        st.sampled_from(sorted(OPTIONS)).flatmap(
            lambda name: OPTIONS[name].map(lambda value: [name, value])
        )
    ),
    flags=st.lists(FLAGS, unique=True, max_size=2),
)
def test_options_of_serve_reach_its_replicas(options: list[list[str]], flags: list[str]) -> None:
    arguments = [
        "--port",
        "1",
        "--host",
        "::1",
        *flags,
        *(part for pair in options for part in pair),
    ]
    given_options = parse_options(arguments)
    server, engine = build_replica_settings(given_options)
    (pool,) = plan_pools(MODEL, [], [ReplicaGroup(1)], 30.0, given_options, {})
    replica_server, replica_engine = build_replica_settings(options_of(pool.engine.command))
    assert replica_engine == msgspec.structs.replace(engine, model=MODEL.source)
    assert replica_server == msgspec.structs.replace(
        server, host="localhost", port=8000, served_model_names=MODEL.names, log_name="{name}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 0}, "a whole number >= 1 - at `\\$.max_seqs`, but it is 0"),
        ({"dtype": "int3"}, "at `\\$.dtype`; write auto, bfloat16, float16 or float32"),
        ({"kv_memory": "x"}, "at `\\$.kv_memory`, but it is 'x'"),
        ({"max_seq": 1}, "`max_seq`; did you mean `max_seqs`"),
    ],
)
def test_invalid_option_is_named_with_its_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_replica_settings(options)


def test_groups_of_replicas_and_embedding_models_are_pools() -> None:
    groups = [ReplicaGroup(2, shared_gpu="0"), ReplicaGroup(1, shared_gpu="GPU-7")]
    options = {"max_seqs": 4, "threads": 2}
    added = ServedModel(("coder",), "/models/coder")
    pools = plan_pools(
        MODEL, [EMBEDDING], groups, 2.5, options, {"TMPDIR": "/run/x"}, added_models=[added]
    )
    config = declare_fleet(pools)
    assert parse_fleet(dump_fleet(config, "json")) == config
    first, second, coder, embedding = config.pools
    assert [(pool.name, pool.replicas) for pool in config.pools] == [
        ("replica-0", 2),
        ("replica-1", 1),
        ("model-0", 1),
        ("embedding-0", 1),
    ]
    assert first.environment == {"TMPDIR": "/run/x", "CUDA_VISIBLE_DEVICES": "0"}
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert options_of(config.engines[second.engine].command)["max_seqs"] == 4
    coder_options = options_of(config.engines[coder.engine].command)
    assert (coder_options["max_seqs"], coder_options["colocated_replicas"]) == (4, 4)
    _, engine = build_replica_settings(options_of(config.engines[embedding.engine].command))
    assert (engine.device, engine.threads, engine.max_seqs) == ("cpu", 2, 64)
    assert [(model.name, model.aliases) for model in config.models] == [
        ("chat", ("other name",)),
        ("coder", ()),
        ("minilm", ()),
    ]


def test_replicas_with_own_gpus_are_one_pool() -> None:
    (pool,) = plan_pools(MODEL, [], [ReplicaGroup(2, accelerators=1)], 30.0, {}, {})
    assert (pool.config.name, pool.config.replicas, pool.config.accelerators) == ("replica", 2, 1)
