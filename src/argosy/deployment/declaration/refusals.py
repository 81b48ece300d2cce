"""Requests that the change of a declaration refuses or cuts, and for how long. Other requests are not lost.

Gateways that are restarted hand their listening sockets over, and replicas are drained, so few changes refuse any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.deployment.declaration.comparison import ChangeEffect, PlannedChange
from argosy.deployment.declaration.config import (
    FleetConfig,
    build_gateway_config,
    has_address_conflict,
    listen_url,
)
from argosy.http_server import listen_addresses

_NARROWED_LIMITS = {
    "body_limit_bytes": "Requests with larger bodies than `body_limit_bytes` are refused.",
    "max_connections_per_address": "Connections beyond `max_connections_per_address` are refused.",
    "queue.max_bytes": "Requests beyond `queue.max_bytes` are refused.",
    "queue.max_requests": "Requests beyond `queue.max_requests` are refused.",
    "queue.timeout_s": "Requests that wait longer than `queue.timeout_s` are refused.",
}
"""Sentences about limits that refuse requests if they become smaller, by path of the setting."""


def describe_refusals(
    old: FleetConfig,
    new: FleetConfig,
    changes: Sequence[PlannedChange],
    gateway_start_s: float | None = None,
) -> tuple[str, ...]:
    """Return a sentence for each kind of request that is refused or cut because of a change; empty if none is.

    Args:
        old: The declaration in force.
        new: The new declaration.
        changes: Their differences.
        gateway_start_s: How long the start of a gateway took; None if it is unknown.
    """
    sentences = [*_describe_addresses(old, new, gateway_start_s), *_describe_models(old, new)]
    restarts = any(change.effect == ChangeEffect.GATEWAY_RESTART for change in changes)
    if (old.gateways and new.gateways < old.gateways) or restarts:
        sentences.append(
            f"Responses that an old gateway has not ended {old.drain_deadline_s:g} s after its replacement "
            "(`drain_deadline_s`) are cut."
        )
    for change in changes:
        sentences += _describe_setting(change)
    return tuple(dict.fromkeys(sentences))


def _lost_addresses(old_host: str, new_host: str) -> list[str]:
    """Return the addresses of a host that another one does not include."""
    kept = listen_addresses(new_host)
    return [
        address
        for address in listen_addresses(old_host)
        if address not in kept and ("::" if ":" in address else "0.0.0.0") not in kept  # noqa: S104
    ]


def _describe_addresses(
    old: FleetConfig, new: FleetConfig, gateway_start_s: float | None
) -> Iterator[str]:
    """Yield what happens to requests to addresses that change, or at which no gateway listens meanwhile."""
    if not old.gateways:
        return
    if not new.gateways:
        yield "All requests are refused from then on, because no gateway remains."
        return
    before, after = (
        [listen_url(build_gateway_config(config, ordinal)) for ordinal in range(config.gateways)]
        for config in (old, new)
    )
    gone = [url for url in before if url not in after]
    if gone:
        yield f"Requests to {' and '.join(gone)} are refused from then on. Clients use {after[0]}."
    elif lost := _lost_addresses(old.host, new.host):
        is_ipv6 = all(":" in address for address in lost)
        others = "over IPv6" if is_ipv6 else f"to other addresses than {new.host}"
        yield f"Requests {others} are refused from then on."
    if has_address_conflict(old, new):
        duration = "a few" if gateway_start_s is None else f"about {max(1, round(gateway_start_s))}"
        yield (
            f"Requests to each gateway are refused for {duration} s, because the old one has to stop before the new "
            "one can listen on `host`."
        )


def _describe_models(old: FleetConfig, new: FleetConfig) -> Iterator[str]:
    """Yield what happens to requests for names and models that nothing answers any more."""
    before, after = (
        {name for model in config.models for name in (model.name, *model.aliases)}
        for config in (old, new)
    )
    for name in sorted(before - after):
        yield f"Requests for the model {name} are refused from then on."
    for model in new.models:
        if model.name not in before or model.replicas or model.is_answered_by_others:
            continue
        had, has = (
            [pool for pool in config.pools if pool.model == model.name] for config in (old, new)
        )
        if any(pool.initial_replicas or pool.scales_to_zero for pool in had) and not any(
            pool.initial_replicas or pool.scales_to_zero for pool in has
        ):
            yield f"Requests for the model {model.name} are refused from then on, because it has no replica."


def _describe_setting(change: PlannedChange) -> Iterator[str]:
    if change.effect == ChangeEffect.REPLICAS_REPLACED and change.count <= change.max_unavailable:
        yield (
            f"Requests to the pool {' and '.join(change.pools)} wait until a new replica is ready, because all may "
            "leave at once (`max_unavailable`). They are refused after `timeouts.failover_timeout_s`."
        )
    if change.effect in {ChangeEffect.REPLICAS_REPLACED, ChangeEffect.REPLICAS_STOPPED}:
        yield (
            "Responses that a replica has not ended within its `drain_deadline_s`, and that cannot be resumed on "
            "another one, are cut."
        )
    section = change.path.partition(".")[0]
    if change.path in _NARROWED_LIMITS and _is_smaller(change.new, change.old):
        yield _NARROWED_LIMITS[change.path]
    elif (
        section == "timeouts"
        and "connect" not in change.path
        and _is_smaller(change.new, change.old)
    ):
        yield f"Requests that take longer than `{change.path}` are ended."
    elif section == "tls":
        yield "Clients that do not connect as the new `tls` requires are refused."
    elif section == "auth":
        yield "Requests that the new `auth` does not accept are refused."
    elif section == "store":
        yield "Requests with keys that the new `store` does not contain are refused."
    elif change.path == "unknown_fields" and change.new == "refuse":
        yield "Requests with unknown fields are refused."


def _is_smaller(new: object, old: object) -> bool:
    """Return whether a limit becomes smaller. None is no limit."""
    if not isinstance(new, (int, float)):
        return False
    return not isinstance(old, (int, float)) or new < old
