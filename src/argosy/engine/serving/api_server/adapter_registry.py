"""LoRA adapters that a replica serves: their names, their files, and the requests that use each version."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import structlog

from argosy.engine.engine_request import AdapterSource
from argosy.engine.serving.adapter_files import ADAPTER_FILE, read_adapter_source
from argosy.model_store import (
    DIGEST_PREFIX,
    REFERENCE_PREFIX,
    ModelStoreError,
    compute_manifest,
    list_model_files,
    open_model_store,
)
from argosy.protocol import MAX_REPORTED_ADAPTERS, ApiError, ResidentAdapter, adapter_digest_prefix

if TYPE_CHECKING:
    from argosy.engine.serving.preprocessing.request_processor import RequestProcessor

MAX_NAME_CHARS = 256
MAX_KNOWN_ADAPTERS = 4096
"""Maximum number of adapters without a name and without requests whose files are remembered."""
SCAN_INTERVAL_S = 5.0
"""Minimum time between two scans of the adapter folder for an unknown digest."""
MAX_SCANNED_FOLDERS = 10_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adapter of `--lora-modules`, in vLLM's form."""

    name: str
    path: str
    base_model_name: str | None = None
    """Name of the base model, which is a hint only."""

    @classmethod
    def parse(cls, text: str) -> LoraModule:
        """Parse `NAME=PATH` or a JSON object.

        Raises:
            ValueError: The text is neither.
        """
        try:
            if text.lstrip().startswith("{"):
                return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"--lora-modules {text[:200]}: {error}") from error
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise ValueError(
                f'--lora-modules {text[:200]}: write NAME=PATH, or {{"name": "NAME", "path": "PATH"}}'
            )
        return cls(name, path)


class AdapterEngine(Protocol):
    """Part of the engine client that loads adapters."""

    resident_adapters: dict[str, int]

    async def load_adapter(self, source: AdapterSource, *, is_pinned: bool = False) -> None:
        """Load an adapter before its first request."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Free the memory of an adapter as soon as no request uses it."""
        ...


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """Adapter with the processor of its requests."""

    source: AdapterSource
    processor: RequestProcessor
    """That of the model, or one with the adapter's own chat template."""
    created_at: int
    """Unix time in seconds."""
    names: set[str] = field(default_factory=set)
    users: int = 0
    """Number of requests that use it, from before their preparation to their end."""
    used_at: float = 0.0
    is_retired: bool = False
    """Whether its memory is freed after the last request, because its name was removed or has another version."""


class AdapterLease:
    """Adapter of one request as a context manager, at whose end the request gives it up."""

    def __init__(self) -> None:
        self._held: tuple[AdapterRegistry, ServedAdapter] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._held is not None:
            registry, adapter = self._held
            registry.release(adapter)

    def acquire(self, registry: AdapterRegistry, name: str) -> ServedAdapter | None:
        """Return the adapter with a name or a digest, or None. An unknown digest is looked for on disk."""
        adapter = registry.acquire(name)
        if adapter is not None:
            self._held = registry, adapter
        return adapter


class AdapterRegistry:
    """Registry of adapters by name and by digest.

    A name means the version that it had when its request arrived, whatever becomes of the name. Names are changed on
    one event loop. `acquire` and `find` may be called from any thread.

    Args:
        engine: Loads the adapters.
        root: Folder whose adapters may be loaded by path or digest. If it is empty, stored ones only.
        create_processor: Creates the processor for a folder, which may have a chat template of its own.
        reserved_names: Names of the model.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        root: str,
        create_processor: Callable[[Path], RequestProcessor],
        reserved_names: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._root = Path(root).expanduser().resolve() if root else None
        self._create_processor = create_processor
        self._reserved_names = reserved_names
        self._by_name: dict[str, ServedAdapter] = {}
        self._by_digest: dict[str, ServedAdapter] = {}
        self._lock = threading.Lock()
        """Guards the maps and the counts of users."""
        self._scan_lock = threading.Lock()
        self._scanned: dict[str, Path] = {}
        self._scanned_at = float("-inf")
        self._names_in_progress: set[str] = set()

    @property
    def named(self) -> dict[str, ServedAdapter]:
        """Adapters by name, in the order of their registration."""
        with self._lock:
            return dict(self._by_name)

    def acquire(self, name: str) -> ServedAdapter | None:
        """Find an adapter by name or digest and count a user of it, or return None. Call `release` at the end."""
        while (adapter := self.find(name)) is not None:
            with self._lock:
                if not adapter.is_retired:
                    adapter.users += 1
                    adapter.used_at = time.monotonic()
                    return adapter
        return None

    def release(self, adapter: ServedAdapter) -> None:
        """Count one user less. The memory of a retired adapter is freed after its last one."""
        with self._lock:
            adapter.users -= 1
            adapter.used_at = time.monotonic()
        self._unload_if_unused(adapter)

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter with a name or a digest, or None. An unknown digest is looked for on disk."""
        with self._lock:
            adapter = self._by_name.get(name) or self._by_digest.get(name)
        if adapter is not None or not _DIGEST.fullmatch(name):
            return adapter
        folder = self._find_digest(name)
        if folder is None:
            return None
        try:
            return self._open(folder, name)
        except (ModelStoreError, OSError, ValueError) as error:
            raise _invalid_adapter(str(error)) from error

    def prepare_load(
        self, name: str, path: str, *, in_place: bool = False, is_trusted: bool = False
    ) -> ServedAdapter:
        """Check a name, and read the files of the adapter that it shall have.

        Args:
            name: The name.
            path: Folder, `store:NAME` or digest.
            in_place: Whether a name that exists gets another version.
            is_trusted: Whether any folder may be loaded, and not only those below the adapter folder.

        Raises:
            ApiError: 400 if the name cannot be used, or the path has no adapter that may be loaded.
        """
        self._check_name(name)
        if not in_place and name in self.named:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise ApiError(400, "invalid_value", message, param="lora_name")
        try:
            return self._open(self._resolve(path, is_trusted=is_trusted))
        except (ModelStoreError, OSError, ValueError) as error:
            raise _invalid_adapter(str(error)) from error

    async def load(self, name: str, adapter: ServedAdapter, *, is_pinned: bool = False) -> None:
        """Load an adapter, and give it a name if that succeeds. Requests of an earlier version of the name keep it.

        Raises:
            ApiError: 400 if the model cannot use it, 503 if it cannot be loaded now.
        """
        if name in self._names_in_progress:
            message = f"The lora adapter '{name}' is being loaded. Try again later."
            raise ApiError(409, "conflict", message, param="lora_name")
        self._names_in_progress.add(name)
        with self._lock:
            adapter.users += 1  # so that it is not unloaded meanwhile
        try:
            await self._engine.load_adapter(adapter.source, is_pinned=is_pinned)
            self._publish(name, adapter)
        finally:
            self._names_in_progress.discard(name)
            self.release(adapter)

    def unload(self, name: str) -> None:
        """Remove a name. Running requests end as they would, and then the memory is freed.

        Raises:
            ApiError: 404 if no adapter has the name.
        """
        with self._lock:
            adapter = self._by_name.pop(name, None)
        if adapter is None:
            message = f"The lora adapter '{name[:MAX_NAME_CHARS]}' cannot be found."
            raise ApiError(404, "model_not_found", message, param="lora_name")
        self._remove_name(name, adapter)
        log.info("adapter_name_removed", name=name, adapter=adapter.source.digest)

    def report(self) -> list[ResidentAdapter]:
        """Return the resident adapters for the load report, those that were used last first."""
        now = time.monotonic()
        reports = []
        for digest, size_bytes in self._engine.resident_adapters.items():
            adapter = self._by_digest.get(digest)
            idle_s = now if adapter is None else now - adapter.used_at
            if adapter is not None and adapter.users:
                idle_s = 0.0
            reports.append(
                ResidentAdapter(
                    digest=adapter_digest_prefix(digest), size_bytes=size_bytes, idle_s=idle_s
                )
            )
        return sorted(reports, key=lambda each: each.idle_s)[:MAX_REPORTED_ADAPTERS]

    def name_of(self, digest: str) -> str:
        """Return the first name of an adapter, or its digest if it has none."""
        adapter = self._by_digest.get(digest)
        return min(adapter.names, default=digest) if adapter is not None else digest

    def _publish(self, name: str, adapter: ServedAdapter) -> None:
        with self._lock:
            earlier = self._by_name.get(name)
            self._by_name[name] = self._by_digest[adapter.source.digest] = adapter
            adapter.names.add(name)
            adapter.is_retired = False
        if earlier is not None and earlier is not adapter:
            self._remove_name(name, earlier)
        log.info("adapter_name_added", name=name, adapter=adapter.source.digest)

    def _remove_name(self, name: str, adapter: ServedAdapter) -> None:
        """Retire an adapter with its last name."""
        with self._lock:
            adapter.names.discard(name)
            if adapter.names:
                return
            adapter.is_retired = True
            self._by_digest.pop(adapter.source.digest, None)
        self._unload_if_unused(adapter)

    def _unload_if_unused(self, adapter: ServedAdapter) -> None:
        digest = adapter.source.digest
        with self._lock:
            if not adapter.is_retired or adapter.users or digest in self._by_digest:
                return
        self._engine.unload_adapter(digest)

    def _open(self, folder: Path, digest: str = "") -> ServedAdapter:
        """Return the adapter of a folder, which is known from then on.

        Args:
            folder: Folder with the files.
            digest: Their digest, if the store or a scan knows it. The engine verifies it when it loads them.

        Raises:
            ValueError: The folder holds no adapter.
            OSError: A file cannot be read.
        """
        source = read_adapter_source(folder, digest)
        with self._lock:
            known = self._by_digest.get(source.digest)
            if known is not None:
                known.source = source
                return known
        adapter = ServedAdapter(source, self._create_processor(folder), int(time.time()))
        with self._lock:
            self._forget_unused()
            return self._by_digest.setdefault(source.digest, adapter)

    def _forget_unused(self) -> None:
        unused = [
            digest
            for digest, adapter in self._by_digest.items()
            if not (adapter.names or adapter.users or digest in self._engine.resident_adapters)
        ]
        for digest in unused[: max(0, len(unused) - MAX_KNOWN_ADAPTERS)]:
            del self._by_digest[digest]

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            problem = f"must have 1 to {MAX_NAME_CHARS} printable characters"
        elif name in self._reserved_names:
            problem = "is the name of the model; choose another one"
        elif name.startswith(DIGEST_PREFIX):
            problem = "must not look like a digest; choose another one"
        else:
            return
        message = f"The name {name[:MAX_NAME_CHARS]!r} of an adapter {problem}."
        raise ApiError(400, "invalid_value", message, param="lora_name")

    def _resolve(self, path: str, *, is_trusted: bool) -> Path:
        """Return the folder of an adapter, which is a stored one, or unless trusted, below the adapter folder.

        Raises:
            ValueError: There is none, or it may not be loaded.
        """
        if path.startswith((REFERENCE_PREFIX, DIGEST_PREFIX)):
            folder = self._find_digest(path) if _DIGEST.fullmatch(path) else None
            if folder is None:
                store = open_model_store()
                folder = store.model_path(store.find(path).digest)
            if folder is None:
                raise ValueError(f"the files of {path} are missing in the model store")
            return folder
        if is_trusted:
            return Path(path).expanduser().resolve()
        if self._root is None:
            raise ValueError(
                "paths may not be loaded, because the replica has no --adapter-root; give store:NAME or a digest"
            )
        folder = (self._root / path).resolve()
        if self._root not in folder.parents:
            raise ValueError("the path is not below the --adapter-root of the replica")
        return folder

    def _find_digest(self, digest: str) -> Path | None:
        """Return the folder of an adapter in the model store or in the adapter folder, or None."""
        try:
            stored = open_model_store().model_path(digest)
        except (ModelStoreError, OSError):
            stored = None
        if stored is not None and (stored / ADAPTER_FILE).is_file():
            return stored
        if self._root is None:
            return None
        with self._scan_lock:
            if digest not in self._scanned:
                now = time.monotonic()
                if now - self._scanned_at < SCAN_INTERVAL_S:
                    return None
                self._scanned, self._scanned_at = _scan(self._root), now
            return self._scanned.get(digest)


def _scan(root: Path) -> dict[str, Path]:
    """Return the adapters in a folder and in its folders, by digest. Those that cannot be read are left out."""
    found = {}
    files = [file for depth in ("*", "*/*") for file in root.glob(f"{depth}/{ADAPTER_FILE}")]
    for file in files[:MAX_SCANNED_FOLDERS]:
        folder = file.parent.resolve()
        if root not in folder.parents:
            continue
        try:
            found[compute_manifest(list_model_files(folder)).digest] = folder
        except (ModelStoreError, OSError) as error:
            log.warning("adapter_unreadable", folder=str(folder), error=str(error))
    return found


def _invalid_adapter(problem: str) -> ApiError:
    return ApiError(
        400, "invalid_adapter", f"The adapter cannot be used: {problem}.", param="lora_path"
    )
