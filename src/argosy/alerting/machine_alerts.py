"""Conditions of alerts about what controllers and gateways both depend on: store, disk, certificate, and gateways."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from argosy.policy.alerting import AlertCondition, ConditionTimer, Severity
from argosy.process import run_in_daemon_thread
from argosy.store import LIVENESS_TIMEOUT_S, GatewayRecord, GatewayRegistry, StoreError

STORE_TIMEOUT_S = 5.0
STORE_UNREACHABLE_S = 60.0
SILENT_GATEWAY_S = 3600.0
"""Time after which a gateway that was not stopped in order is forgotten."""
FULL_BYTES = 512 << 20
NEARLY_FULL_BYTES = 10 << 30
NEARLY_FULL_SHARE = 0.05
DAY_S = 86_400.0
CERTIFICATE_PAGE_S = 2 * DAY_S
CERTIFICATE_TICKET_S = 14 * DAY_S


class MachineAlerts:
    """Source of conditions about store, disk, certificate and the gateways of the store.

    Args:
        gateways: The gateways of the store. None without a store.
        folder: Folder whose disk must have room.
        find_certificate: Returns the file of the server's TLS certificate (PEM); None without TLS.
    """

    def __init__(
        self,
        gateways: GatewayRegistry | None,
        folder: Path,
        find_certificate: Callable[[], Path | None],
    ) -> None:
        self._gateways = gateways
        self._folder = folder
        self._find_certificate = find_certificate
        self._timer = ConditionTimer()
        self._silent: list[AlertCondition] = []
        """Conditions of gateways by the last answer of the store."""
        self._store_failed_at = float("-inf")

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions as they are now."""
        self._timer.forget_old(now)
        conditions = await run_in_daemon_thread(self._judge_disk)
        certificate = self._find_certificate()
        if certificate is not None:
            conditions += await run_in_daemon_thread(_judge_certificate, certificate, now)
        if self._gateways is None:
            return conditions
        problem = ""
        try:
            known = await asyncio.wait_for(
                run_in_daemon_thread(self._gateways.list_known), STORE_TIMEOUT_S
            )
            self._silent = _judge_gateways(known, now)
        except StoreError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"It has not answered within {STORE_TIMEOUT_S:.0f} s."
        if problem:
            self._store_failed_at = now
        if now - self._store_failed_at < LIVENESS_TIMEOUT_S:  # gateways could not report either
            self._silent = [msgspec.structs.replace(each, is_firing=None) for each in self._silent]
        return [*conditions, *self._silent, self._judge_store(problem, now)]

    def _judge_store(self, problem: str, now: float) -> AlertCondition:
        gone_s, is_firing = self._timer.judge(
            "store", holds=bool(problem), limit_s=STORE_UNREACHABLE_S, now=now
        )
        return AlertCondition(
            name="StoreUnreachable",
            labels={},
            severity="page",
            is_firing=is_firing,
            summary="The store cannot be used",
            description=(
                f"The store has failed for {gone_s:.0f} s. Requests are still served, with the last known accounts. "
                f"No replica is healed or scaled, and usage waits on the disks of the gateways. {problem}"
            ),
            runbook="storeunreachable",
        )

    def _judge_disk(self) -> list[AlertCondition]:
        folder = next(each for each in (self._folder, *self._folder.parents) if each.exists())
        disk = shutil.disk_usage(folder)
        is_nearly_full = disk.free < min(NEARLY_FULL_BYTES, NEARLY_FULL_SHARE * disk.total)
        severities: dict[Severity, bool] = {
            "page": disk.free < FULL_BYTES,
            "ticket": is_nearly_full,
        }
        return [
            AlertCondition(
                name="DiskNearlyFull",
                labels={"folder": str(folder)},
                severity=severity,
                is_firing=is_firing,
                summary=f"The disk of {folder} is nearly full",
                description=(
                    f"{disk.free / 2**30:.1f} GiB of {disk.total / 2**30:.1f} GiB are free. On a full disk usage is "
                    "not recorded, and requests of tenants with limits are refused."
                ),
                runbook="disknearlyfull",
            )
            for severity, is_firing in severities.items()
        ]


def _judge_gateways(known: list[GatewayRecord], now: float) -> list[AlertCondition]:
    """Return a condition for each gateway that stopped without removing its record, and was not started again.

    A gateway that only its own machine reaches has another port after each start, so any other one there replaces it.
    """
    running = {each.url for each in known if now - each.seen_at < LIVENESS_TIMEOUT_S}
    has_local = any(map(_is_local, running))
    return [
        AlertCondition(
            name="GatewaySilent",
            labels={"gateway": url},
            severity="ticket",
            is_firing=url not in running,
            summary=f"The gateway at {url} no longer reports",
            description=(
                f"Its last sign was {now - max(each.seen_at for each in known if each.url == url):.0f} s ago. It was "
                "not stopped in order: it was killed, its machine is gone, or it cannot reach the store."
            ),
            runbook="gatewaysilent",
        )
        for url in sorted({each.url for each in known if now - each.seen_at < SILENT_GATEWAY_S})
        if url in running or not (has_local and _is_local(url))
    ]


def _is_local(url: str) -> bool:
    """Return whether a gateway has an address that other machines do not reach."""
    host = urlsplit(url).hostname or ""
    return host in {"", "localhost", "::1"} or host.startswith("127.")


def _judge_certificate(path: Path, now: float) -> list[AlertCondition]:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return []  # the watcher of the certificate logs it
    left_s = certificate.not_valid_after_utc.timestamp() - now
    severities: dict[Severity, float] = {
        "page": CERTIFICATE_PAGE_S,
        "ticket": CERTIFICATE_TICKET_S,
    }
    return [
        AlertCondition(
            name="CertificateExpires",
            labels={"file": str(path)},
            severity=severity,
            is_firing=left_s < limit_s,
            summary=f"The certificate {path} expires",
            description=(
                f"It is valid until {certificate.not_valid_after_utc:%d %B %Y %H:%M} UTC, for "
                f"{max(0.0, left_s) / DAY_S:.1f} days. Then clients refuse to connect."
            ),
            runbook="certificateexpires",
        )
        for severity, limit_s in severities.items()
    ]
