"""Models and replicas that the controller of a fleet publishes to its gateways, kept on disk for its absence.

The controller also reads from each gateway what it routes to, the demand, and the measurements of rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from argosy.deployment import (
    REQUEST_SETTINGS,
    CacheRule,
    ContentRule,
    GatewayConfig,
    ModelConfig,
    ObjectivesConfig,
    PromptConfig,
    PromptRule,
    RequestSetting,
    RouteConfig,
    TruncationRule,
    list_request_settings,
)
from argosy.folders import state_folder
from argosy.gateway.http_route import HttpRoute
from argosy.gateway.model_registry import ModelRegistry, build_model_entries
from argosy.gateway.objective_recorder import ObjectiveRecorder
from argosy.gateway.peer_connection import check_peer_token, send_signed
from argosy.gateway.pool import ModelStartup
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import DemandReport
from argosy.gateway.rollout_messages import OutcomeQuery, OutcomeReport, PublishedVersions
from argosy.gateway.upstream import UpstreamError
from argosy.http_server import ANY_METHOD, HttpExchange, TlsConfig
from argosy.policy import ReplicaStatus
from argosy.policy.detection import CellMinute
from argosy.policy.traffic import FeatureFlag, PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, ErrorBody, parse_body, parse_request_body
from argosy.store import GatewayRecord

POOLS_PATH = "/peer/pools"
OUTCOMES_PATH = "/peer/outcomes"
CELLS_PATH = "/peer/cells"
PUBLISH_TIMEOUT_S = 5.0
MAX_CONTROLLER_SILENCE_S = 15.0
"""Time without a request of the controller from which its replica counts are not exposed any more."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

T = TypeVar("T")
P = TypeVar("P", bound="FleetPools")


_RULES_IN_FULL = tuple(f"{name}[]." for name in REQUEST_SETTINGS if name != "routes")
"""Rules that are not applied without a setting that is unknown."""


class FleetPools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Version of the models, replicas and routes of a fleet. Versions are ordered by epoch, then by number."""

    fleet: str
    epoch: int = 0
    """Epoch of the controller that published it."""
    version: int = 0
    models: Sequence[ModelConfig] = ()
    routes: Sequence[RouteConfig] = ()
    content_rules: Sequence[ContentRule] = ()
    cache_rules: Sequence[CacheRule] = ()
    truncation_rules: Sequence[TruncationRule] = ()
    prompt_rules: Sequence[PromptRule] = ()
    prompts: Sequence[PromptConfig] = ()
    feature_flags: Mapping[str, FeatureFlag] = {}
    objectives: ObjectivesConfig = ObjectivesConfig()
    serving_replicas: Mapping[str, int] = {}
    """Number of replicas that shall serve, by model."""
    desired_replicas: Mapping[str, int] = {}
    """Number of replicas that the autoscaler wants, by pool."""
    pool_models: Mapping[str, str] = {}
    """Name of the model of each pool."""
    startups: Mapping[str, ModelStartup] = {}
    """Models that are scaled to zero, or start again, by name. A model that has a replica is not among them."""
    versions: Sequence[PublishedVersions] = ()
    """Versions of the pools whose changes are rollouts."""

    @property
    def rules(self) -> list[RequestSetting]:
        """The rules for requests of all kinds, and the prompts that they name."""
        return list_request_settings(self)

    @property
    def order(self) -> tuple[int, int]:
        """Key by which a later version is greater."""
        return self.epoch, self.version


class SavedPools(FleetPools, frozen=True, kw_only=True, omit_defaults=True):
    """The version that is kept on disk, with the routes that the gateway followed, since they may be later ones."""

    followed_routes: Sequence[PoolRoute] = ()


class RoutedReplica(msgspec.Struct, frozen=True):
    """Replica as one gateway sees it."""

    model: str
    replica: str
    status: ReplicaStatus
    reason: str = ""


class CellsQuery(msgspec.Struct, frozen=True):
    """Question of the controller for counted requests."""

    after: int
    """Start of the last minute that it has, in seconds since the epoch."""


class OtherFleetError(RuntimeError):
    """Raised if a gateway on the same store belongs to another fleet, or to none."""


class PoolsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a gateway to its controller."""

    epoch: int
    version: int
    replicas: Sequence[RoutedReplica] = ()
    demand: DemandReport | None = None
    """None if it is unknown."""
    routes: Mapping[str, int] = {}
    """Version of the route that the gateway follows, by pool."""
    watched_logs: Sequence[str] = ()
    """Replicas whose logs the gateway shows."""


def load_fleet_pools(config: GatewayConfig) -> SavedPools:
    """Return the last version that the controller of the gateway's fleet published, or an empty one.

    A file that is damaged or of another fleet is logged and counts as none.
    """
    path, none = _pools_path(config), SavedPools(fleet=config.fleet or "")
    try:
        pools, _ = _parse_pools(SavedPools, path.read_bytes())
        models = list(pools.models)
        build_model_entries(msgspec.structs.replace(config, models=models), pools.versions)
    except FileNotFoundError:
        return none
    except (OSError, ValueError, ApiError) as error:
        log.warning("fleet_pools_unreadable", path=str(path), reason=str(error))
        return none
    return pools if pools.fleet == config.fleet else none


class _PublishedRoutes(msgspec.Struct):
    routes: list[msgspec.Raw] = []


def _parse_pools(kind: type[P], body: bytes) -> tuple[P, tuple[str, ...]]:
    """Parse pools of this version or a later one. Returns them with the settings that this version does not know.

    Unknown settings of models and replicas are ignored. A route with one is left out, since it might be a condition,
    without which the route would match other requests.

    Raises:
        ApiError: A known setting has an invalid value. Or one of `_RULES_IN_FULL` has an unknown one, so that more
            might leave than it permits.
    """
    pools, ignored = parse_request_body(kind, body)
    unknown = [name for name in ignored if name.startswith(_RULES_IN_FULL)]
    if unknown:
        message = (
            f"This version does not know {unknown[0]}. Upgrade the gateway, or remove the setting."
        )
        raise ApiError(400, "unknown_setting", message)
    if any(name.startswith("routes[].") for name in ignored):
        known = []
        for route in msgspec.json.decode(body, type=_PublishedRoutes).routes:
            with contextlib.suppress(msgspec.ValidationError):
                known.append(msgspec.json.decode(route, type=RouteConfig))
        pools = msgspec.structs.replace(pools, routes=known)
    return pools, ignored


def _save(path: Path, pools: SavedPools) -> None:
    """Replace the file atomically. Only this user can read it, since headers may be secret. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(temporary, flags, mode=0o600), "wb") as file:
            file.write(msgspec.json.encode(pools))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _pools_path(config: GatewayConfig) -> Path:
    if config.pools_file is not None:
        return Path(config.pools_file)
    return state_folder() / "fleets" / (config.fleet or "") / "pools.json"


class FleetPoolsHandler:
    """Handler of the controller's requests: it reads and replaces the models and replicas, and reads measurements.

    Not thread-safe: use it from one event loop.
    """

    def __init__(
        self,
        config: GatewayConfig,
        pools: FleetPools,
        registry: ModelRegistry,
        objectives: ObjectiveRecorder,
        on_models_changed: Callable[[], None],
    ) -> None:
        """Create the handler."""
        self._config = config
        self._pools = pools
        self._registry = registry
        registry.apply_startups(pools.startups)
        self._objectives = objectives
        self._on_models_changed = on_models_changed
        self._lock = asyncio.Lock()
        self._controller_seen_at = float("-inf")
        self._ignored_settings: tuple[str, ...] = ()
        self._published = asyncio.Event()
        if pools.version:
            self._published.set()

    async def wait_until_published(self) -> None:
        """Wait until the controller has published models to this gateway, or to one before it."""
        await self._published.wait()

    @property
    def desired_replicas(self) -> Mapping[str, int]:
        """Number of replicas that the autoscaler wants, by pool. Empty while no controller sends requests."""
        return {} if self.is_controller_silent else self._pools.desired_replicas

    @property
    def desired_replicas_by_model(self) -> Mapping[str, int]:
        """The same number by model."""
        counts: Counter[str] = Counter()
        for pool, count in self.desired_replicas.items():
            counts[self._pools.pool_models.get(pool, pool)] += count
        return counts

    @property
    def serving_replicas(self) -> Mapping[str, int]:
        """Number of replicas that shall serve, by model, as the controller published it last."""
        return self._pools.serving_replicas

    @property
    def is_controller_silent(self) -> bool:
        """Whether no controller has sent a request for a while, or none ever has."""
        return time.monotonic() - self._controller_seen_at > MAX_CONTROLLER_SILENCE_S

    @property
    def versions(self) -> Sequence[PublishedVersions]:
        """Versions of the pools whose changes are rollouts."""
        return self._pools.versions

    def build_routes(
        self,
        secret: str,
        read_demand: Callable[[], DemandReport],
        build_report: Callable[[OutcomeQuery], OutcomeReport],
        read_cells: Callable[[int], Sequence[CellMinute]],
        list_watched_logs: Callable[[], Sequence[str]],
    ) -> list[HttpRoute]:
        """Return the routes for requests that are signed with `secret`.

        Their handlers raise ApiError: 404 for other requests, 409 for an outdated version, 400 for an invalid body.
        """

        async def read_body(exchange: HttpExchange) -> bytes:
            body = await exchange.read_body()
            subject = _describe_request(exchange.method, exchange.path, body)
            check_peer_token(exchange, secret, subject)
            return body

        async def handle_pools(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the controller
            body = await read_body(exchange)
            if exchange.method == "PUT":
                async with self._lock:
                    await self._apply(self._parse(body))
            self._controller_seen_at = time.monotonic()
            status = self._read_status(read_demand(), list_watched_logs())
            await exchange.send_response(200, msgspec.json.encode(status))

        async def handle_outcomes(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the controller
            report = build_report(parse_body(OutcomeQuery, await read_body(exchange)))
            self._controller_seen_at = time.monotonic()
            await exchange.send_response(200, msgspec.json.encode(report))

        async def handle_cells(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the controller
            after = parse_body(CellsQuery, await read_body(exchange)).after
            await exchange.send_response(200, msgspec.json.encode(read_cells(after)))

        return [
            HttpRoute("POST", CELLS_PATH, handle_cells, is_public=True),
            HttpRoute(ANY_METHOD, POOLS_PATH, handle_pools, is_public=True),
            HttpRoute("POST", OUTCOMES_PATH, handle_outcomes, is_public=True),
        ]

    def _parse(self, body: bytes) -> FleetPools:
        """Parse published pools, and log the settings of a later version that are ignored. Raises ApiError."""
        pools, ignored = _parse_pools(FleetPools, body)
        if ignored != self._ignored_settings:
            self._ignored_settings = ignored
            if ignored:
                log.warning("fleet_settings_ignored", settings=ignored)
        return pools

    async def _apply(self, pools: FleetPools) -> None:
        if pools.fleet != self._pools.fleet:
            message = f"This gateway belongs to the fleet {self._pools.fleet!r}, not {pools.fleet!r}. Check `fleet`."
            raise ApiError(409, "other_fleet", message)
        if pools.order < self._pools.order:
            message = (
                f"This gateway has version {self._pools.version} of epoch {self._pools.epoch}. "
                "Another controller leads the fleet."
            )
            raise ApiError(409, "stale_version", message)
        if pools.order == self._pools.order:
            return
        config = msgspec.structs.replace(self._config, models=list(pools.models))
        try:
            entries = await run_in_daemon_thread(build_model_entries, config, pools.versions)
        except (ValueError, OSError) as error:
            raise ApiError(400, "invalid_value", str(error)) from error
        self._registry.apply_config(entries, pools.rules)
        self._registry.apply_startups(pools.startups)
        self._objectives.apply(pools.objectives)
        self._pools = pools
        self._published.set()
        self._on_models_changed()
        log.info("fleet_pools_applied", epoch=pools.epoch, version=pools.version)
        await self._save()

    async def follow_routes(self, routes: Collection[PoolRoute]) -> None:
        """Follow those of the routes that are later than the known ones of their pools."""
        if self._registry.follow_routes(routes):
            self._on_models_changed()
            async with self._lock:
                await self._save()

    async def _save(self) -> None:
        routes = tuple(self._registry.routes.values())
        saved = SavedPools(**msgspec.structs.asdict(self._pools) | {"followed_routes": routes})
        try:
            await run_in_daemon_thread(_save, _pools_path(self._config), saved)
        except OSError as error:  # routing matters more than the copy for times without controller
            log.error("fleet_pools_not_saved", reason=str(error))  # noqa: TRY400 - the reason suffices

    def _read_status(self, demand: DemandReport, watched_logs: Sequence[str]) -> PoolsStatus:
        now = time.monotonic()
        return PoolsStatus(
            epoch=self._pools.epoch,
            version=self._pools.version,
            replicas=[
                RoutedReplica(
                    pool.model, replica.name, replica.health.status(now), replica.health.reason(now)
                )
                for pool in self._registry.router.all_pools
                for replica in pool.replicas.values()
            ],
            demand=demand,
            routes={route.pool: route.version for route in self._registry.routes.values()},
            watched_logs=watched_logs,
        )


class GatewayPoolsClient:
    """The controller's side: publishes pools to registered gateways, and reads what they route to and measure.

    Args:
        tls: Certificate of the controller, for gateways that require client certificates.
    """

    def __init__(self, tls: TlsConfig | None = None) -> None:
        self._tls = tls

    async def publish(self, gateway: GatewayRecord, pools: FleetPools) -> PoolsStatus:
        """Replace a gateway's pools. One with this version or a later one keeps it, and a later one raises `ApiError`.

        Raises:
            UpstreamError: The gateway cannot be reached.
            ApiError: It refuses the version.
            OtherFleetError: It does not belong to the fleet.
        """
        body = msgspec.json.encode(pools)
        return await self._send(gateway, "PUT", POOLS_PATH, body, PoolsStatus)

    async def read_status(self, gateway: GatewayRecord) -> PoolsStatus:
        """Return what a gateway routes to. Raises as `publish`."""
        return await self._send(gateway, "GET", POOLS_PATH, b"", PoolsStatus)

    async def read_outcomes(self, gateway: GatewayRecord, query: OutcomeQuery) -> OutcomeReport:
        """Return a gateway's measurements of the versions of a pool.

        Raises:
            UpstreamError: The gateway cannot be reached.
            OtherFleetError: It does not belong to the fleet.
        """
        body = msgspec.json.encode(query)
        return await self._send(gateway, "POST", OUTCOMES_PATH, body, OutcomeReport)

    async def read_cells(self, gateway: GatewayRecord, after: int) -> list[CellMinute]:
        """Return the minutes of requests that a gateway has counted after a time. Raises as `publish`."""
        body = msgspec.json.encode(CellsQuery(after))
        return await self._send(gateway, "POST", CELLS_PATH, body, list[CellMinute])

    async def _send(
        self, gateway: GatewayRecord, method: str, path: str, body: bytes, answer_type: type[T]
    ) -> T:
        subject = _describe_request(method, path, body)
        status, answer = await send_signed(
            gateway, self._tls, method, path, body, subject=subject, timeout_s=PUBLISH_TIMEOUT_S
        )
        if status == 404 or (status == 409 and _read_error_code(answer) == "other_fleet"):
            raise OtherFleetError(gateway.id)  # a gateway without a fleet has no such path
        if status != 200:
            raise ApiError(status, "gateway_refused", answer[:500].decode(errors="replace"))
        try:
            return msgspec.json.decode(answer, type=answer_type)
        except msgspec.MsgspecError as error:
            raise UpstreamError(f"it answers {error}", before_response=False) from error


def _read_error_code(answer: bytes) -> str | None:
    try:
        return msgspec.json.decode(answer, type=ErrorBody).error.code
    except msgspec.MsgspecError:
        return None


def _describe_request(method: str, path: str, body: bytes) -> str:
    """Return what the token of a request signs."""
    return f"{method} {path}\n{hashlib.sha256(body).hexdigest()}"
