"""Pools of `argosy serve`: its options reach the replicas, and the declaration describes what was started first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import typer
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from argosy.cli.serve_pools import ServedModel, declare_fleet, plan_pools
from argosy.cli.serve_settings import given_replica_options, with_shared_options
from argosy.deployment import dump_fleet, parse_fleet, pool_digests
from argosy.engine import EngineConfig, ReplicaServerConfig
from argosy.fleet import ReplicaGroup
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers import LaunchSpec

SERVER = ReplicaServerConfig(served_model_names=("chat", "other name"), drain_deadline_s=2.5)
MODEL = ServedModel(SERVER.served_model_names, "/models/a folder")
EMBEDDING = ServedModel(("minilm",), "/models/minilm")

Settings = tuple[ReplicaServerConfig, EngineConfig, dict[str, Any]]


def parse_options(arguments: Sequence[str]) -> Settings:
    """Return the settings that a command with the shared options gets, and the options for its replicas."""
    parsed: list[Settings] = []

    @with_shared_options
    def command(
        server: ReplicaServerConfig,
        engine: EngineConfig,
        *,
        context: typer.Context,
        log_name: str = "",
        log_level: str = "",
        colocated_replicas: int = 0,
    ) -> None:
        del log_name, log_level, colocated_replicas
        parsed.append((server, engine, given_replica_options(context)))

    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app)(list(arguments), standalone_mode=False)
    return parsed[0]


OPTIONS = {
    "--dtype": st.sampled_from(["auto", "float32"]),
    "--generation-config": st.sampled_from(["none", "/a folder"]),
    "--kv-memory": st.sampled_from(["64MiB", "123456789"]),
    "--label": st.sampled_from(["rack=a", "host=b c"]),
    "--max-seqs": st.integers(1, 1000).map(str),
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
    server, engine, replica_options = parse_options(arguments)
    (pool,) = plan_pools(MODEL, [], [ReplicaGroup(1)], SERVER, replica_options, {})
    replica_server, replica_engine, _ = parse_options(pool.command[5:])
    assert replica_engine == msgspec.structs.replace(engine, model=MODEL.source)
    assert replica_server == msgspec.structs.replace(
        server,
        host="127.0.0.1",
        port=8000,
        uds="{socket}",
        served_model_names=SERVER.served_model_names,
        drain_deadline_s=SERVER.drain_deadline_s,
    )


def test_declaration_describes_first_replicas() -> None:
    groups = [ReplicaGroup(2, shared_gpu="0"), ReplicaGroup(1, shared_gpu="GPU-7")]
    options = {"max_seqs": 4, "threads": 2}
    pools = plan_pools(MODEL, [EMBEDDING], groups, SERVER, options, {"TMPDIR": "/run/x"})
    config = parse_fleet(dump_fleet(declare_fleet(pools), "json"))
    declared: dict[str, LaunchSpec] = {}
    for pool in config.pools:
        for ordinal in range(pool.initial_replicas):
            spec = build_launch_spec(config, pool, 1, ordinal)
            declared[spec.name] = spec
    assert declared == {spec.name: spec for pool in pools for spec in pool.launch_specs()}
    assert list(declared) == ["replica-0-1-0", "replica-0-1-1", "replica-1-1-0", "embedding-0-1-0"]
    assert declared["replica-0-1-1"].environment == {
        "TMPDIR": "/run/x",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert declared["replica-1-1-0"].environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert "--max-seqs" not in declared["embedding-0-1-0"].command
    _, engine, _ = parse_options(declared["embedding-0-1-0"].command[5:])
    assert (engine.device, engine.threads) == ("cpu", 2)
    assert [model.name for model in config.models] == ["chat", "minilm"]
    assert config.models[0].aliases == ("other name",)
    assert pool_digests(config).keys() == {pool.name for pool in pools}


def test_replicas_with_own_gpus_are_one_pool() -> None:
    (pool,) = plan_pools(MODEL, [], [ReplicaGroup(2, accelerators=1)], SERVER, {}, {})
    assert [spec.resources.accelerators for spec in pool.launch_specs()] == [1, 1]
    assert [spec.name for spec in pool.launch_specs()] == ["replica-1-0", "replica-1-1"]
