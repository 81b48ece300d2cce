"""The declaration of a fleet: the gateway's settings, and the models, pools and engines that a controller runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.declaration.engines import EngineKind, OptionName, OptionValue
from argosy.deployment.declaration.rollout_config import RolloutConfig
from argosy.deployment.settings.alerting_config import AlertingConfig
from argosy.deployment.settings.gateway_config import (
    GatewayConfig,
    ModelConfig,
    ModelName,
    SleepConfig,
)
from argosy.deployment.settings.secret_reference import SecretReference, VariableName
from argosy.http_server import listen_addresses
from argosy.policy.autoscaling import WEEKDAYS, ScheduleWindow, Weekday
from argosy.settings import ByCommandLine, ByOperator, Size, parse_size

ObjectName = Annotated[
    str,
    Meta(
        max_length=63,
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9-]+)*$(?!\n)",
        examples=["my-object"],
    ),
]
"""Name of a Kubernetes object."""
ResourceName = Annotated[
    str,
    Meta(
        max_length=253,
        pattern=r"^[A-Za-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)",
        examples=["nvidia.com/gpu"],
    ),
]

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compares
"""Hosts that stand for all addresses of the machine."""
_NOT_OF_PODS = ("namespace", "context", "image", "pre_pull_images")
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[
    str, Meta(max_length=40, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$(?!\n)", examples=["chat-1"])
]
"""Name that Kubernetes and Ray accept. It is short, because replicas are named `NAME-GENERATION-ORDINAL`."""
ReplicaCount = Annotated[int, Meta(ge=0, le=10_000)]
Share = (
    Annotated[int, Meta(ge=0, le=10_000)]
    | Annotated[str, Meta(pattern=r"^(100|[1-9]?[0-9])%$(?!\n)", examples=["25%"])]
)
"""Number of replicas, or a share of the pool's replicas such as `25%`."""
LauncherName = Literal["local", "ray", "kubernetes"]
LabelText = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$(?!\n)",
        max_length=253,
        examples=["team.example.com/tier"],
    ),
]


ClockTime = Annotated[
    str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$(?!\n)", examples=["08:30"])
]
"""Hour and minute, such as `08:30`."""
_GATEWAY_FIELDS = GatewayConfig.__struct_fields__
_MODEL_FIELDS = ModelConfig.__struct_fields__


class VolumeClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume that every replica mounts, for example with the weights."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim. Pods of several nodes need one that several nodes can mount."""
    path: Annotated[str, Meta(pattern=r"^/[^\s:]+$(?!\n)", examples=["/models"])]
    """Folder of the container in which it is mounted."""
    read_only: bool = True
    """Whether it is mounted for reading only."""


class Toleration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A taint of nodes that replicas tolerate."""

    key: Annotated[str, Meta(min_length=1)]
    value: str | None = None
    """Value of the taint. None tolerates any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. None tolerates all effects."""


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pools with `launcher: kubernetes`, and the manifests of `argosy render kubernetes`."""

    namespace: ObjectName = "default"
    """Namespace of all objects. Change it only while the fleet is down."""
    context: str | None = None
    """Context of the kubeconfig file. None means its current one, or the service account if the controller runs in a
    pod. Change it only while the fleet is down."""
    image: (
        Annotated[
            str,
            Meta(min_length=1, pattern=r"^\S+$(?!\n)", examples=["registry.example.com/argosy:1"]),
        ]
        | None
    ) = None
    """Container image of the rendered gateways and controllers."""
    secret_name: ObjectName | None = None
    """Secret with the values to which the `environment` of pools and `alerting` refer: `{env: HF_TOKEN}` is its key
    `HF_TOKEN`, and `{file: /run/secrets/hf-token}` its key `hf-token`."""
    service_account: ObjectName | None = None
    """Service account of the replicas' pods. They get no token of it."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets with the credentials of image registries."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """Resource that is requested for each of a pool's `accelerators`. Its taint is tolerated."""
    tolerations: tuple[Toleration, ...] = ()
    """Further taints of nodes that replicas tolerate."""
    volumes: tuple[VolumeClaim, ...] = ()
    """Volumes of the replicas."""
    run_as_user: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = 10_001
    """User and group of the processes. With null it is the image's user, who may then be root."""
    read_only_root: bool = True
    """Whether the root file system is read-only. `/tmp`, which is also the home folder, is writable anyway."""
    pre_pull_images: bool = False
    """Pull the images of pools to all nodes that may run their replicas, before a replica is placed there."""

    def pod_settings(self) -> dict[str, Any]:
        """Return the settings whose change replaces running pods."""
        settings = msgspec.to_builtins(self)
        return {name: value for name, value in settings.items() if name not in _NOT_OF_PODS}


class FleetModelConfig(ModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public model name, and the replicas that answer for it: those of its pools, and those listed by URL."""

    source: ByOperator[
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=2000,
                pattern=r"^[^\s\x00-\x1f\x7f-\x9f-]([^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$(?!\n)",
                examples=["argosy-mini", "/models/chat"],
            ),
        ]
        | None
    ] = None
    """Location of the weights: path of a directory or a GGUF file, name on the hub (owner/name), or name of a bundled
    model (`argosy-mini`). A path starts with `/`, `./`, `../` or `~`. It is relative to the folder of its settings
    file. `store:NAME`, `store:NAME:STAGE` and `sha256:DIGEST` are models of the store, and `s3://...` is a URL.
    The name of a stored model becomes its digest when the file is read. A promotion takes effect at the next apply."""
    revision: ByOperator[
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=200,
                pattern=r"^[^\s\x00-\x1f\x7f-\x9f-][^\s\x00-\x1f\x7f-\x9f]*$(?!\n)",
                examples=["main"],
            ),
        ]
        | None
    ] = None
    """Branch, tag or commit of the source."""
    digest: ByOperator[
        Annotated[
            str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", examples=["sha256:" + "0" * 64])
        ]
        | None
    ] = None
    """SHA-256 digest of the model's manifest (`argosy models show`). Another digest is another model, so its replicas
    are replaced. Replicas of the engine `argosy` compare every file with it before they load one; other engines do
    not."""
    quality_gate: ByCommandLine[Literal["off", "required"]] = "off"
    """`required` refuses a declaration of a version without a passing quality report for its digest. `argosy quantize`
    writes the report beside the model. `argosy models pull` keeps it in the store."""


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of the week at which a pool keeps more replicas."""

    min_replicas: ByOperator[Annotated[int, Meta(ge=1, le=10_000)]]
    """Fewest replicas that serve at these times."""
    start: ByOperator[ClockTime]
    """Local time at which the replicas are ready, such as `08:00`. They start earlier, by the time that it takes."""
    end: ByOperator[ClockTime]
    """Local time from which they may stop again, on the next day if it is not after `start`."""
    days: ByOperator[Annotated[tuple[Weekday, ...], Meta(min_length=1)]] = WEEKDAYS
    """Days on which the times start."""
    timezone: ByOperator[str] = "UTC"
    """Name in the IANA time zone database, such as `Europe/Berlin`."""

    def to_window(self) -> ScheduleWindow:
        """Return the window of the autoscaler. Raises ValueError if the time zone does not exist."""
        return ScheduleWindow(
            min_replicas=self.min_replicas,
            start=time.fromisoformat(self.start),
            end=time.fromisoformat(self.end),
            days=self.days,
            timezone=self.timezone,
        )


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the number of replicas of a pool follows the demand, between `min_replicas` and `max_replicas`."""

    mode: ByOperator[Literal["off", "advisory", "on"]] = "off"
    """`on` lets the controller change the number. `advisory` only records what it would do. `replicas` beside
    `min_replicas` and `max_replicas`, as `argosy scale POOL N` sets it, pauses the autoscaler."""
    tokens_per_s: ByOperator[Positive | None] = None
    """Tokens per second that a replica serves within the objectives; a token of output counts as two. By default it is
    learnt from the replicas. Engines other than `argosy` do not report what that needs."""
    spare_fraction: ByOperator[Annotated[float, Meta(ge=0, le=10)]] = 0.15
    """Share of the demand that is provided in addition."""
    down_window_s: ByOperator[Annotated[float, Meta(ge=60, le=3600)]] = 600.0
    """Time whose peak demand the remaining replicas must hold before one is removed."""
    schedules: ByOperator[tuple[ScheduleConfig, ...]] = ()
    """Times at which the minimum is higher."""
    scale_to_zero_after_s: ByOperator[Annotated[float, Meta(gt=0, le=604_800)]] = 1200.0
    """Time without requests after which a pool with `min_replicas: 0` runs no replicas. The next request starts one,
    and waits for it in the gateway (`cold_start`)."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas of one model that are alike."""

    name: ByOperator[Name]
    """Name of the pool. Its replicas are named `NAME-GENERATION-ORDINAL`."""
    model: ByOperator[ModelName]
    """Name of the model that the replicas run."""
    engine: ByOperator[str] = "argosy"
    """Engine kind: `argosy`, `vllm`, `sglang`, `llama-cpp`, or one of `engines`."""
    options: ByOperator[dict[OptionName, OptionValue]] = {}
    """Options of the engine's command line, without dashes, such as `max_seqs: 16`."""
    environment: ByCommandLine[dict[VariableName, str | SecretReference]] = {}
    """Environment variables of the replicas. Secrets are references to a variable or a file of the controller:
    `{env: HF_TOKEN}`. Of the controller's own variables, replicas get those of the system, devices and engines only,
    and none whose name says that it is a secret."""
    accelerators: ByOperator[Annotated[int, Meta(ge=0, le=1024)]] = 0
    """Number of GPUs of each replica."""
    cpus: ByOperator[Annotated[float, Meta(gt=0, le=4096)] | None] = None
    """Number of CPU cores of each replica. None does not restrict it."""
    memory: ByOperator[Size | None] = None
    """Maximum memory of each replica, such as `16GiB`. None does not restrict it."""
    dollars_per_hour: ByOperator[Annotated[float, Meta(ge=0, le=1e6)]] = 0.0
    """Price of the hardware of a replica for an hour, in dollars. `argosy usage cost` divides it among projects."""
    owner: ByOperator[Annotated[str, Meta(max_length=200)]] = ""
    """Team or person to ask about the pool. `argosy usage advice` shows it."""
    keep_idle: ByOperator[bool] = False
    """Whether its replicas are wanted without requests too. No advice is to stop them."""
    replicas: ByOperator[ReplicaCount | None] = None
    """Number of replicas that serve. 1 if neither it nor `min_replicas` is set."""
    min_replicas: ByOperator[ReplicaCount | None] = None
    """Fewest replicas that serve, and their number without `replicas` and `autoscaling`."""
    max_replicas: ByOperator[ReplicaCount | None] = None
    """Most replicas that serve."""
    autoscaling: ByOperator[AutoscalingConfig] = AutoscalingConfig()
    """How the number of replicas follows the demand. It needs `min_replicas` and `max_replicas`."""
    spares: ByOperator[ReplicaCount] = 0
    """Number of further replicas that are started and warm, and serve when another one is lost."""
    sleep: ByOperator[SleepConfig | None] = None
    """When the replicas sleep, which frees their memory while their processes stay. None leaves that to the model."""
    launcher: ByCommandLine[LauncherName] = "local"
    """Where the replicas run: `local` are processes on the controller's machine, `ray` are nodes of a Ray cluster, and
    `kubernetes` are pods."""
    zones: ByOperator[tuple[LabelText, ...]] = ()
    """Zones over which the replicas are spread. Empty for any."""
    labels: ByOperator[dict[LabelText, LabelText]] = {}
    """Labels that a node must have to run a replica."""
    custom_resources: ByOperator[dict[LabelText, Annotated[float, Meta(gt=0, le=1_000_000)]]] = {}
    """Amounts of custom resources of a Ray cluster that each replica takes from its node."""
    max_surge: ByOperator[Share] = 1
    """Number or share (rounded up) of replicas that a replacement may start before others have ended."""
    max_unavailable: ByOperator[Share] = "25%"
    """Number or share (rounded down) of replicas that may be out of service at once because of the controller."""
    drain_deadline_s: ByOperator[Annotated[float, Meta(ge=0, le=86_400)]] = 30.0
    """How long the running requests of a replica may take when it stops."""
    start_timeout_s: ByOperator[Positive] = 600.0
    """Time without an answer after the start from which a replica is killed and restarted."""
    hang_timeout_s: ByOperator[Positive] = 10.0
    """Time without an answer from which a replica that has served is killed and restarted."""
    warm_up: ByOperator[bool] = True
    """Send requests to a replica before it serves, so that no client waits for what the first request prepares."""
    image: ByCommandLine[
        Annotated[
            str,
            Meta(min_length=1, pattern=r"^\S+$(?!\n)", examples=["registry.example.com/argosy:1"]),
        ]
        | None
    ] = None
    """Container image. Used by launchers that run containers, and required by `kubernetes`."""
    rollout: ByOperator[RolloutConfig | None] = None
    """How users get to a new version when a change needs new replicas. By default these replace the old ones one by
    one, and serve at once. It needs a model with this pool only. `rollout: {}` takes all defaults."""

    @property
    def secret_references(self) -> dict[str, SecretReference]:
        """Variables of the replicas whose values are secrets."""
        return {
            name: value
            for name, value in self.environment.items()
            if isinstance(value, SecretReference)
        }

    @property
    def initial_replicas(self) -> int:
        """Number of replicas to start with: the declared one, or the fewest that the autoscaler may keep."""
        return next((n for n in (self.replicas, self.min_replicas) if n is not None), 1)

    @property
    def is_autoscaled(self) -> bool:
        """Whether an autoscaler decides the number of replicas. A number of the declaration pauses it."""
        return self.autoscaling.mode == "on" and self.replicas is None

    @property
    def scales_to_zero(self) -> bool:
        """Whether the autoscaler stops the last replica, and requests start the first."""
        return self.autoscaling.mode == "on" and self.min_replicas == 0

    @property
    def memory_bytes(self) -> int | None:
        """Maximum memory of a replica in bytes."""
        return None if self.memory is None else parse_size(self.memory)

    def count_spares(self, replicas: int) -> int:
        """Return the number of spares beside this number of replicas. A pool that is scaled to zero has none."""
        return 0 if self.scales_to_zero and not replicas else self.spares

    def max_surge_count(self, replicas: int) -> int:
        """Return the maximum number of replicas beyond `replicas` during a replacement."""
        return _count_share(self.max_surge, replicas, rounds_up=True)

    def max_unavailable_count(self, replicas: int, spares: int) -> int:
        """Return the maximum number of `replicas` that may be out of service at once.

        It is at least 1 if there is neither a surge nor a spare, because no replica could be replaced otherwise.
        """
        count = _count_share(self.max_unavailable, replicas, rounds_up=False)
        return count or int(self.max_surge_count(replicas) + spares == 0)


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the controllers, one of which is the leader."""

    lease_s: ByOperator[Annotated[float, Meta(ge=1, le=60)]] = 5.0
    """How long a leader may be silent before a standby takes over."""
    keep_events_days: ByOperator[Annotated[int, Meta(ge=1, le=3650)]] = 30
    """Days to keep events. The leader deletes older ones."""
    max_events: ByOperator[Annotated[int, Meta(ge=1000, le=10_000_000)]] = 100_000
    """Number of events to keep. The leader deletes the oldest ones beyond it."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster of pools with `launcher: ray`.

    A controller reads it when it begins to lead. Stop the fleet before a change, since a controller does not find
    replicas in another cluster or namespace.
    """

    address: (
        Annotated[
            str,
            Meta(min_length=1, max_length=300, pattern=r"^[^\s/]+$(?!\n)", examples=["my-cluster"]),
        ]
        | None
    ) = None
    """Address of the head node, such as `10.0.0.1:6379`. By default that of the controller's variable RAY_ADDRESS,
    or of the cluster that the controller's machine is a node of."""
    namespace: Name | None = None
    """Namespace of the fleet's actors. Defaults to `argosy-` with the name of the fleet."""


class FleetConfig(GatewayConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet: the settings of its gateways, and what a controller runs behind them.

    A file without `pools` is a gateway's settings file, and means a fleet that something else runs.
    """

    fleet: ByCommandLine[Name | None] = None
    """Name of the fleet. Defaults to the name of the file, without its ending."""
    models: ByOperator[Annotated[Sequence[FleetModelConfig], Meta(min_length=1)]]
    """Models, and where their weights come from."""
    engines: ByCommandLine[dict[Name, EngineKind]] = msgspec.field(default_factory=dict)
    """Engine kinds in addition to the built-in ones, by name."""
    pools: ByOperator[tuple[PoolConfig, ...]] = ()
    """Replicas to run."""
    log_format: ByOperator[Literal["json", "console"]] = "json"
    """Format of the log lines of gateways and controllers. `argosy logs` selects lines and formats them for people."""
    gateways: ByOperator[Annotated[int, Meta(ge=0, le=64)]] = 1
    """Number of gateways that the controller starts on its machine. The first listens on `port`, each further one on
    the next port. With 0 they run elsewhere, with the same `store` and `fleet` in their settings."""
    controller: ByOperator[ControllerConfig] = ControllerConfig()
    """The controllers."""
    ray: ByCommandLine[RayConfig] = RayConfig()
    """The Ray cluster of pools with `launcher: ray`."""
    kubernetes: ByCommandLine[KubernetesSettings] = KubernetesSettings()
    """The pools with `launcher: kubernetes`, and the manifests of `argosy render kubernetes`."""

    def model_of(self, pool: PoolConfig) -> FleetModelConfig:
        """Return the model that a pool runs."""
        return next(model for model in self.models if model.name == pool.model)

    def find_pool(self, name: str) -> PoolConfig | None:
        """Return the pool of this name, or None."""
        return next((pool for pool in self.pools if pool.name == name), None)


def _count_share(share: int | str, total: int, *, rounds_up: bool) -> int:
    if isinstance(share, int):
        return share
    hundredths = total * int(share.removesuffix("%"))
    return -(-hundredths // 100) if rounds_up else hundredths // 100


def build_gateway_config(config: FleetConfig, ordinal: int = 0) -> GatewayConfig:
    """Build the settings of one of the controller's gateways, without what only the controller needs.

    `ordinal` is the number of the gateway. Each listens on a port of its own.
    """
    settings = {name: getattr(config, name) for name in _GATEWAY_FIELDS}
    sleeps = {pool.model: pool.sleep for pool in config.pools if pool.sleep is not None}
    models = [
        ModelConfig(
            **{name: getattr(model, name) for name in _MODEL_FIELDS}
            | ({"sleep": sleeps[model.name]} if model.name in sleeps else {})
        )
        for model in config.models
    ]
    port = config.port + ordinal if config.port else 0
    return msgspec.structs.replace(
        GatewayConfig(**settings), models=models, port=port, alerting=AlertingConfig()
    )


def listen_url(settings: GatewayConfig) -> str:
    """Return the address of a gateway, as seen from its machine."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    loops_back = settings.host in WILDCARD_HOSTS or settings.host == "localhost"
    host = "127.0.0.1" if loops_back else settings.host
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def has_address_conflict(old: FleetConfig, new: FleetConfig) -> bool:
    """Return whether the gateways of a fleet have to end before those of another declaration can listen.

    A listening socket is handed over to a gateway with the same address. All addresses of a machine and one of them
    exclude each other, if they are of the same family.
    """
    pairs = itertools.product(listen_addresses(old.host), listen_addresses(new.host))
    if not any(
        before != after and (":" in before) == (":" in after) and WILDCARD_HOSTS & {before, after}
        for before, after in pairs
    ):
        return False
    if old.uds is not None or new.uds is not None:
        return False
    last_start = max(old.port, new.port)
    return bool(old.port) and last_start < min(old.port + old.gateways, new.port + new.gateways)
