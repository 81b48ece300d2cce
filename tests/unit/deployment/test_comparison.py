"""Comparison of declarations: every difference is listed with the effect that applying it has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.deployment import (
    OBSERVED_NAME,
    REPLICA_PREFIX,
    ROUTE_PREFIX,
    ChangeAction,
    ChangeEffect,
    FleetConfig,
    MachineCapacity,
    ObservedRevision,
    PlannedChange,
    ReplicaRecord,
    apply_declaration,
    check_capacity,
    compare_fleets,
    describe_refusals,
    parse_fleet,
    plan_declaration,
    read_fleet_status,
    replica_digest,
)
from argosy.policy.reconciliation import ReplicaPhase
from argosy.policy.traffic import PoolRoute
from argosy.store import FleetDocument, open_memory_store

BASE: dict[str, Any] = {
    "models": [
        {"name": "chat", "source": "/chat"},
        {"name": "code", "source": "/code", "replicas": [{"url": "http://a", "name": "a"}]},
    ],
    "pools": [
        {"name": "chat", "model": "chat", "replicas": 4, "options": {"max_seqs": 16}},
        {"name": "batch", "model": "chat", "replicas": 2, "spares": 1, "max_unavailable": 2},
        {"name": "own", "model": "code", "engine": "mine", "min_replicas": 1, "max_replicas": 3},
    ],
    "engines": {"mine": {"command": ["serve", "{model}", "{port}"]}},
    "routes": [{"name": "r", "target_model": "code"}],
}


def parse(*overlays: str) -> FleetConfig:
    """Return the base declaration, changed by `path=value` in JSON, where a path contains names of list items."""
    document = msgspec.json.decode(msgspec.json.encode(BASE))
    for overlay in overlays:
        path, _, value = overlay.partition("=")
        *parents, key = path.split("/")
        parent = document
        for name in parents:
            is_list = isinstance(parent, list)
            parent = next(p for p in parent if p["name"] == name) if is_list else parent[name]
        if isinstance(parent, list):
            parent.append(msgspec.json.decode(value))
        else:
            parent[key] = msgspec.json.decode(value)
    return parse_fleet(msgspec.json.encode(document))


@pytest.mark.parametrize(
    ("overlay", "path", "effect", "pools", "counts"),
    [
        ("pools/chat/replicas=6", "pools[chat].replicas", "replicas started", ["chat"], (2, 2, 0)),
        ("pools/chat/replicas=0", "pools[chat].replicas", "replicas stopped", ["chat"], (4, 4, 0)),
        ("pools/batch/spares=3", "pools[batch].spares", "replicas started", ["batch"], (2, 2, 0)),
        ("pools/own/max_replicas=9", "pools[own].max_replicas", "none", [], (0, 0, 0)),
        ("pools/own/min_replicas=2", "pools[own].min_replicas", "replicas started", ["own"], (1, 1, 0)),
        ("pools/chat/options/max_seqs=8", "pools[chat].options.max_seqs", "replicas replaced", ["chat"], (4, 2, 1)),
        ('pools/chat/memory="1GiB"', "pools[chat].memory", "replicas replaced", ["chat"], (4, 2, 1)),
        ('pools/chat/model="code"', "pools[chat].model", "replicas replaced", ["chat"], (4, 2, 1)),
        ("pools/chat/max_surge=3", "pools[chat].max_surge", "none", [], (0, 0, 0)),
        ('pools/chat/environment={"A":"b"}', "pools[chat].environment.A", "replicas replaced", ["chat"], (4, 2, 1)),
        ("pools/chat/cpus=2", "pools[chat].cpus", "replicas replaced", ["chat"], (4, 2, 1)),
        ('pools/chat/image="x"', "pools[chat].image", "replicas replaced", ["chat"], (4, 2, 1)),
        ('pools/own/launcher="ray"', "pools[own].launcher", "replicas replaced", ["own"], (1, 1, 0)),
        ('pools/own/engine="vllm"', "pools[own].engine", "replicas replaced", ["own"], (1, 1, 0)),
        ("pools/chat/drain_deadline_s=1", "pools[chat].drain_deadline_s", "replicas replaced", ["chat"], (4, 2, 1)),
        ("pools/own/drain_deadline_s=1", "pools[own].drain_deadline_s", "none", [], (0, 0, 0)),
        ('pools/chat/max_unavailable="50%"', "pools[chat].max_unavailable", "none", [], (0, 0, 0)),
        ("pools/chat/hang_timeout_s=60", "pools[chat].hang_timeout_s", "none", [], (0, 0, 0)),
        ("pools/chat/warm_up=false", "pools[chat].warm_up", "none", [], (0, 0, 0)),
        ('pools/x={"name":"x","model":"chat"}', "pools[x]", "replicas started", ["x"], (1, 1, 0)),
        ('models/chat/source="/other"', "models[chat].source", "replicas replaced", ["chat", "batch"], (7, 5, 3)),
        ('models/chat/aliases=["c"]', "models[chat].aliases", "gateway reload", [], (0, 0, 0)),
        ("models/code/replicas/a/weight=2", "models[code].replicas[a].weight", "gateway reload", [], (0, 0, 0)),
        ('routes/r/target_model="chat"', "routes[r].target_model", "gateway reload", [], (0, 0, 0)),
        ('engines/mine/command=["x","{port}"]', "engines.mine.command", "replicas replaced", ["own"], (1, 1, 0)),
        ('engines/mine/kind="openai"', "engines.mine.kind", "gateway reload", [], (0, 0, 0)),
        ('engines/mine/ready_path="/r"', "engines.mine.ready_path", "none", [], (0, 0, 0)),
        ('engines/new={"command":["{port}"]}', "engines.new", "none", [], (0, 0, 0)),
        ("gateways=3", "gateways", "gateways started", [], (2, 0, 0)),
        ("port=9000", "port", "gateway restart", [], (0, 0, 0)),
        ('timeouts={"connect_timeout_s":1}', "timeouts.connect_timeout_s", "gateway restart", [], (0, 0, 0)),
        ('controller={"lease_s":9}', "controller.lease_s", "none", [], (0, 0, 0)),
        ('objectives={"ttft_p95_s":1}', "objectives.ttft_p95_s", "none", [], (0, 0, 0)),
    ],
)  # fmt: skip
def test_change_has_its_effect(
    overlay: str,
    path: str,
    effect: str,
    pools: list[str],
    counts: tuple[int, int, int],
) -> None:
    (change,) = compare_fleets(parse(), parse(overlay))
    assert change.path == path
    assert (change.effect, list(change.pools)) == (effect, pools)
    assert (change.count, change.at_once, change.max_unavailable) == counts
    (undone,) = compare_fleets(parse(overlay), parse())
    assert (undone.old, undone.new) == (change.new, change.old)
    assert msgspec.json.decode(msgspec.json.encode(change), type=PlannedChange) == change


ROLLOUT = 'pools/chat/rollout={"steps":["25%"],"max_surge":0}'


def test_digest_ignores_how_options_and_sizes_are_written() -> None:
    def digest(options: str, memory: str) -> str:
        config = parse(f"pools/chat/options={options}", f"pools/chat/memory={memory}")
        return replica_digest(config, config.pools[0])

    first = digest('{"max_seqs":4,"threads":2}', '"1GiB"')
    assert first == digest('{"threads":2,"max_seqs":4}', "1073741824")
    assert first != digest('{"max_seqs":4,"threads":1}', '"1GiB"')


def test_pool_with_rollouts_is_rolled_out() -> None:
    alone = ('pools/batch/model="code"', ROLLOUT, 'pools/chat/model="chat"')
    old, new = parse(*alone), parse(*alone, 'models/chat/source="/other"')
    (change,) = compare_fleets(old, new)
    assert (change.effect, change.pools, change.count) == ("replicas rolled out", ("chat",), 4)
    steps, risk = change.rollout
    assert steps == (
        "The pool chat gets a rollout by canary: copies of 10 % of the requests, 25 % of the users, all users."
    )
    assert risk.startswith("max_surge is 0")
    (replaced,) = [
        each for each in compare_fleets(parse(alone[0]), new) if each.path == "models[chat].source"
    ]
    assert replaced.effect == ChangeEffect.REPLICAS_REPLACED


def test_first_start_lists_every_setting() -> None:
    changes = {change.path: change for change in compare_fleets(None, parse("port=9000"))}
    assert {change.action for change in changes.values()} == {ChangeAction.ADD}
    assert changes.keys() >= {"models[chat]", "pools[chat]", "pools[batch]", "routes", "port"}
    assert (changes["pools[batch]"].effect, changes["pools[batch]"].count) == (
        ChangeEffect.REPLICAS_STARTED,
        3,
    )
    assert changes["pools[batch]"].new == BASE["pools"][1]
    assert changes["gateways"].effect == ChangeEffect.GATEWAYS_STARTED


def test_pool_that_leaves_is_not_replaced_too() -> None:
    before = parse()
    after = msgspec.structs.replace(
        parse('models/chat/source="/other"'),
        pools=[pool for pool in before.pools if pool.name != "batch"],
    )
    changes = {change.path: change for change in compare_fleets(before, after)}
    assert changes["models[chat].source"].pools == ("chat",)
    assert (changes["pools[batch]"].effect, changes["pools[batch]"].count) == (
        ChangeEffect.REPLICAS_STOPPED,
        3,
    )


def test_order_of_items_is_a_change() -> None:
    before = parse()
    after = msgspec.structs.replace(before, models=before.models[::-1])
    (change,) = compare_fleets(before, after)
    assert (change.path, change.old, change.new) == ("models", ["chat", "code"], ["code", "chat"])


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("port=8000", "port=9000", ["http://127.0.0.1:8000 are refused from then on", "cut"]),
        ('host="127.0.0.1"', 'host="0.0.0.0"', ["to each gateway are refused for about 2 s", "cut"]),
        ('host="0.0.0.0"', 'host="10.0.0.1"', ["127.0.0.1:8000 are", "for about 2 s", "cut"]),
        ('host="::"', 'host="0.0.0.0"', ["over IPv6 are refused", "cut"]),
        ('host="127.0.0.1"', 'host="localhost"', ["cut"]),
        ("gateways=2", "gateways=1", ["http://127.0.0.1:8001 are refused from then on", "cut"]),
        ("gateways=1", "gateways=0", ["no gateway remains", "cut"]),
        ("gateways=1", "gateways=2", []),
        ('log_level="info"', 'log_level="debug"', ["not ended 30 s after"]),
        ("body_limit_bytes=9", "body_limit_bytes=8", ["cut", "larger bodies"]),
        ('queue={"timeout_s":9}', 'queue={"timeout_s":8}', ["cut", "wait longer"]),
        ('queue={"timeout_s":8}', 'queue={"timeout_s":9}', ["cut"]),
        ('timeouts={"request_timeout_s":null}', 'timeouts={"request_timeout_s":9}', ["cut", "ended"]),
        ('auth={"mode":"auto"}', 'auth={"mode":"disabled"}', ["cut", "`auth`"]),
        ('models/chat/aliases=["c"]', 'models/chat/aliases=["d"]', ["the model c are refused"]),
        ("pools/chat/replicas=0", "pools/chat/replicas=4", []),
        ("pools/batch/cpus=1", "pools/batch/cpus=2", ["cannot be resumed"]),
    ],
)  # fmt: skip
def test_plan_names_what_is_refused(old: str, new: str, refused: list[str]) -> None:
    before, after = parse(old), parse(new)
    changes = compare_fleets(before, after)
    sentences = describe_refusals(before, after, changes, gateway_start_s=1.8)
    assert len(sentences) == len(refused), sentences
    for sentence, part in zip(sentences, refused, strict=True):
        assert part in sentence


OVERLAYS = [
    "pools/chat/replicas=6",
    "pools/chat/options/max_seqs=8",
    "pools/chat/cpus=2",
    "pools/batch/spares=0",
    "pools/batch/drain_deadline_s=1",
    "pools/own/min_replicas=3",
    'models/chat/revision="x"',
    'models/code/source="/y"',
    'engines/mine/command=["z", "{port}"]',
    'routes/r/model="chat"',
    "gateways=2",
    "log_content=true",
]


@settings(max_examples=15)
@given(first=st.sets(st.sampled_from(OVERLAYS)), second=st.sets(st.sampled_from(OVERLAYS)))
def test_plan_replaces_exactly_the_pools_whose_digest_changes(
    first: set[str], second: set[str]
) -> None:
    old, new = parse(*sorted(first)), parse(*sorted(second))
    changes = compare_fleets(old, new)
    assert len(changes) == len(first ^ second)
    replaced = {
        name
        for change in changes
        if change.effect == ChangeEffect.REPLICAS_REPLACED
        for name in change.pools
    }
    pools = zip(old.pools, new.pools, strict=True)
    assert replaced == {
        pool.name
        for pool, other in pools
        if replica_digest(old, pool) != replica_digest(new, other)
    }
    added = sum(
        change.count if change.effect == ChangeEffect.REPLICAS_STARTED else -change.count
        for change in changes
        if change.effect in {ChangeEffect.REPLICAS_STARTED, ChangeEffect.REPLICAS_STOPPED}
    )
    totals = [sum(pool.initial_replicas + pool.spares for pool in one.pools) for one in (old, new)]
    assert added == totals[1] - totals[0]


MACHINE = MachineCapacity(cores=4, memory_bytes=24 * 2**30, gpus=2)


@pytest.mark.parametrize(
    ("overlay", "sentence"),
    [
        ("replicas=500", "cannot run .* 4 cores, each of which is enough .*; 12 of them would fit"),
        ("cpus=16", "it has 4 cores, and each replica declares 16, .*; none fits"),
        ('options={"kv_memory": "7GiB"}', "; 3 of them or options.kv_memory of 6144MiB would"),
        (
            'options={"kv_memory": "900GiB"}',
            "900GiB for its KV cache; options.kv_memory of 6144MiB",
        ),
        ("accelerators=1", "it has 2 GPUs to use, and each needs 1; 2 of them would fit"),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(overlay: str, sentence: str) -> None:
    changed = parse(f"pools/chat/{overlay}")
    for old in (parse(), None):
        with pytest.raises(ValueError, match=sentence):
            check_capacity(old, changed, MACHINE)
    shrunk = parse(f"pools/chat/{overlay}", "pools/batch/replicas=1")
    check_capacity(changed, shrunk, MACHINE)
    if "accelerators" in overlay:
        check_capacity(None, parse(f"pools/chat/{overlay}", 'pools/chat/launcher="ray"'), MACHINE)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 2**36), st.integers(1, 64))
def test_number_that_would_fit_is_the_largest(
    replicas: int, spares: int, kv_memory: int, cores: int
) -> None:
    def declare(count: int) -> FleetConfig:
        options = f'pools/chat/options={{"kv_memory": {kv_memory}}}'
        return parse(f"pools/chat/replicas={count}", f"pools/batch/spares={spares}", options)

    machine = msgspec.structs.replace(MACHINE, cores=cores)

    def fits(count: int) -> bool:
        try:
            check_capacity(None, declare(count), machine)
        except ValueError:
            return False
        return True

    try:
        check_capacity(parse(f"pools/batch/spares={spares}"), declare(replicas), machine)
    except ValueError as error:
        assert not fits(replicas)
        if " of them" in str(error):
            found = int(str(error).rpartition("; ")[2].partition(" ")[0])
            assert not fits(found + 1)


def record(name: str, version: str, phase: str = "ready") -> ReplicaRecord:
    pool, generation, ordinal = name.rsplit("-", 2)
    return ReplicaRecord(
        name=name,
        pool=pool,
        generation=int(generation),
        ordinal=int(ordinal),
        launcher="local",
        phase=ReplicaPhase(phase),
        version=version,
    )


@pytest.mark.parametrize(
    ("overlays", "replicas", "stable", "renewed", "lines", "note"),
    [
        (([], []), [record("chat-1-0", "2"), record("gateway-1-0", "2")], "", [], [], ""),
        (
            ([], []),
            [record("chat-1-0", "1"), record("chat-1-1", "2"), record("gateway-1-0", "")],
            "",
            ["chat", "gateway"],
            [
                '~ version: "unknown" -> "2"   (gateway restart)',
                '~ version: "1" -> "2"   (4 replicas replaced, 2 at a time)',
            ],
            "1 gateway and 1 replica run another version (1, unknown) than the controller (2).",
        ),
        (  # one that starts may state its version later, older ones leave, and other engines have their own
            ([], []),
            [record("chat-1-0", "", "loading"), record("batch-0-0", "1"), record("own-1-0", "")],
            "",
            [],
            ["Nothing changes."],
            "",
        ),
        (
            (["pools/chat/rollout={}", 'pools/batch/model="code"'], []),
            [record("chat-1-0", "1")],
            "a" * 64,
            [],
            ["The pool chat keeps version 1, because its declared version does not serve all"],
            "1 replica runs another version (1) than the controller (2).",
        ),
        (  # its settings replace it
            ([], ["pools/chat/cpus=2"]),
            [record("chat-1-0", "1")],
            "",
            [],
            ["+ pools[chat].cpus"],
            "1 replica runs another version (1) than the controller (2).",
        ),
    ],
)
def test_upgrade_replaces_what_runs_another_version(
    overlays: tuple[list[str], list[str]],
    replicas: list[ReplicaRecord],
    stable: str,
    renewed: list[str],
    lines: list[str],
    note: str,
) -> None:
    (declared, changed), store = overlays, open_memory_store()
    fleets, new = store.fleets, parse(*declared, *changed)
    latest = apply_declaration(fleets, "demo", parse(*declared), None, author="a", reason="")
    lease = fleets.acquire_lease("controller", fleets.read_lease("demo"))
    assert lease is not None
    records = {f"{REPLICA_PREFIX}{each.name}": msgspec.json.encode(each) for each in replicas}
    observed = ObservedRevision(epoch=lease.epoch, revision=1, version="2")
    fleets.save_records(lease, {**records, OBSERVED_NAME: msgspec.json.encode(observed)})
    if stable:
        route = msgspec.json.encode(PoolRoute(pool="chat", version=1, stable=stable))
        fleets.replace_document("demo", f"{ROUTE_PREFIX}chat", FleetDocument(1, route), after=0)
    problems = read_fleet_status(fleets, "demo").problems
    notes = [each.text for each in problems if each.kind == "other_version"]
    assert [each.partition(" `")[0] for each in notes] == ([note] if note else [])
    assert not plan_declaration(fleets, "demo", latest, new).renewed
    plan = plan_declaration(fleets, "demo", latest, new, installed="2")
    assert sorted(plan.renewed) == renewed
    assert all(any(line.startswith(each) for line in plan.lines) for each in lines), plan.lines
    applied = apply_declaration(
        fleets, "demo", parse(*declared), latest, author="a", reason="", renewed=plan.renewed
    )
    generations = applied.generations.items()
    assert {name for name, each in generations if each.generation == 2} == {*renewed}
    store.close()


def test_autoscaled_pool_counts_what_runs() -> None:
    scaling = ("models/code/replicas=[]", 'pools/own/autoscaling={"mode": "on", "tokens_per_s": 9}')
    autoscaled = parse(*scaling)
    replaced = parse(*scaling, "pools/own/cpus=1")
    paused = parse(*scaling, "pools/own/replicas=2")
    for new, effect, count in (
        (replaced, "replicas replaced", 3),
        (paused, "replicas stopped", 1),
    ):
        (change,) = compare_fleets(autoscaled, new, {"own": 3})
        assert (change.effect, change.count) == (effect, count)
