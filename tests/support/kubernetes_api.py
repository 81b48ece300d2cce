"""Double of the API server of a Kubernetes cluster.

It does what https://kubernetes.io/docs/reference/using-api/api-concepts/ says, and cites the sections of that page. It
keeps objects in memory, validates each one by the schemas of Kubernetes, and serves what the launcher uses: get, list,
watch, create, replace, merge patch and delete.

Never compared with a real API server by a test. What one did is in `docs/contributing/testing.md`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import msgspec
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

Object = dict[str, Any]
LATEST_VERSION = kubernetes_validate.latest_version()
TOKEN = "token-of-the-test"  # noqa: S105 - not a secret
KINDS = {
    "configmaps": ("v1", "ConfigMap"),
    "daemonsets": ("apps/v1", "DaemonSet"),
    "deployments": ("apps/v1", "Deployment"),
    "nodes": ("v1", "Node"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
    "pods": ("v1", "Pod"),
}


class ApiError(Exception):
    """Response with a Status object."""

    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message or reason,
            "reason": reason,
            "code": code,
        }


class KubernetesApiServer:
    """Objects of all kinds in one namespace, by plural name of the kind and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {plural: {} for plural in KINDS}
        self.requests = Counter[str]()
        """Number of requests by verb and kind, such as `LIST deployments`."""
        self.token = TOKEN
        """Token that requests need. Running watches go on when it changes."""
        self.answers = asyncio.Event()
        """Cleared while the server hangs: connections stay open, and it sends nothing."""
        self.answers.set()
        self.throttled = 0
        """Number of requests to answer with 429."""
        self.refused: dict[str, ApiError] = {}
        """Errors by verb and kind, for all such requests."""
        self.before_write: Callable[[str, str], Awaitable[None]] | None = None
        """Awaited before each write, with the method and the name of the object."""
        self.read_log: Callable[[str, bool], str | None] = lambda _pod, _previous: None
        self.changed = asyncio.Event()
        """Set at each change, for the components of the cluster."""
        self._version = 1000
        self._oldest = 1000
        """Version from which changes are still known."""
        self._history: list[tuple[int, str, str, Object]] = []
        """Version, kind of event, plural and object of each change."""
        self._watchers: dict[asyncio.Event, int] = {}
        """Running watches, each with the number of changes that it has looked at."""
        self._transports: set[asyncio.Transport] = set()
        """Connections of running watches."""
        self._watch_period = 0
        self.expires_watches = False
        """Whether watches end with an error of status 410."""

    @asynccontextmanager
    async def serve(self, kubeconfig: Path) -> AsyncIterator[None]:
        """Serve on a free port, and write a kubeconfig file with its address and token."""
        self._kubeconfig = kubeconfig
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        async with TestServer(app) as server:
            assert server.port is not None
            self._port = server.port
            self.write_kubeconfig()
            try:
                yield
            finally:
                self.answers.set()
                self.end_watches()

    def write_kubeconfig(self) -> None:
        """Write a kubeconfig file with the address and the token of now."""
        self._kubeconfig.write_text(build_kubeconfig("127.0.0.1", self._port, self.token))

    # --- faults ----------------------------------------------------------------------------------

    async def flush_watches(self) -> None:
        """Wait until all watches have sent what has changed."""
        while any(sent < len(self._history) for sent in self._watchers.values()):  # noqa: ASYNC110 - of the same loop
            await asyncio.sleep(0)

    def compact(self) -> None:
        """Forget all changes ("410 Gone responses"): a watch from an older version is refused."""
        self._oldest = self._version
        self._history = [entry for entry in self._history if entry[0] > self._oldest]

    def cut_connections(self) -> None:
        """Cut the connections of all running watches."""
        for transport in self._transports:
            transport.abort()

    def end_watches(self) -> None:
        """End running watches, as the server does when their `timeoutSeconds` have passed."""
        self._watch_period += 1
        self._wake()

    def send_bookmarks(self) -> None:
        """Send the current version to all watches ("Watch bookmarks")."""
        for plural, (version, kind) in KINDS.items():
            body = {
                "apiVersion": version,
                "kind": kind,
                "metadata": {"resourceVersion": str(self._version)},
            }
            self._history.append((self._version, "BOOKMARK", plural, body))
        self._wake()

    # --- objects, for the components of the cluster ----------------------------------------------

    def create(self, plural: str, body: Object) -> Object:
        """Create an object. The server sets its identity and version."""
        self._validate(body)
        metadata = body["metadata"]
        if metadata["name"] in self.objects[plural]:
            message = f'{plural} "{metadata["name"]}" already exists'
            raise ApiError(409, "AlreadyExists", message)
        created = copy.deepcopy(body)
        created["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
            "generation": 1,
        }
        return self._store("ADDED", plural, created)

    def update(self, plural: str, body: Object) -> Object:
        """Replace an object. One that is being deleted ends with its last finalizer ("Resource deletion")."""
        metadata = body["metadata"]
        known = self._find(plural, metadata["name"])
        expected = metadata.get("resourceVersion")  # "Resource versions": optimistic concurrency
        if expected not in {None, known["metadata"]["resourceVersion"]}:
            raise ApiError(409, "Conflict", "the object has been modified")
        self._validate(body)
        updated = copy.deepcopy(body)
        kept = ("uid", "creationTimestamp", "generation", "deletionTimestamp")
        updated["metadata"] |= {k: known["metadata"][k] for k in kept if k in known["metadata"]}
        if updated.get("spec") != known.get("spec"):
            updated["metadata"]["generation"] += 1
        if updated["metadata"].get("deletionTimestamp") and not (
            updated["metadata"].get("finalizers") or plural == "pods"
        ):
            return self.forget(plural, metadata["name"])
        return self._store("MODIFIED", plural, updated)

    def set_status(self, plural: str, name: str, status: Object) -> None:
        """Replace the status of an object, if it changes."""
        known = self.objects[plural].get(name)
        if known is not None and known.get("status") != status:
            self._store("MODIFIED", plural, {**copy.deepcopy(known), "status": status})

    def delete(self, plural: str, name: str, options: Object | None = None) -> Object:
        """Delete an object: at once, or once its finalizers or its grace period permit."""
        options = options or {}
        known = copy.deepcopy(self._find(plural, name))
        metadata = known["metadata"]
        for key, value in options.get("preconditions", {}).items():
            if metadata[key] != value:
                raise ApiError(409, "Conflict", f"Precondition failed: {key}")
        grace_s = options.get("gracePeriodSeconds")
        if plural == "pods":
            # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination
            declared = known["spec"].get("terminationGracePeriodSeconds", 30)
            grace_s = declared if grace_s is None else grace_s
            grace_s = min(grace_s, metadata.get("deletionGracePeriodSeconds", grace_s))
            if grace_s > 0:
                metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace_s}
                return self._store("MODIFIED", plural, known)
        if metadata.get("finalizers"):
            metadata["deletionTimestamp"] = now()
            return self._store("MODIFIED", plural, known)
        return self.forget(plural, name)

    def forget(self, plural: str, name: str) -> Object:
        """Remove an object, and those that it owns."""
        forgotten = copy.deepcopy(self.objects[plural].pop(name))
        self._record("DELETED", plural, forgotten)
        uid = forgotten["metadata"]["uid"]
        for pod_name, pod in list(self.objects["pods"].items()):
            owners = pod["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == uid for owner in owners):
                self.delete("pods", pod_name)
        return forgotten

    def _find(self, plural: str, name: str) -> Object:
        found = self.objects[plural].get(name)
        if found is None:
            raise ApiError(404, "NotFound", f'{plural} "{name}" not found')
        return found

    def _store(self, kind: str, plural: str, each: Object) -> Object:
        self.objects[plural][each["metadata"]["name"]] = each
        self._record(kind, plural, each)
        return each

    def _record(self, kind: str, plural: str, each: Object) -> None:
        self._version += 1
        each["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, plural, copy.deepcopy(each)))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        for watcher in self._watchers:
            watcher.set()

    @staticmethod
    def _validate(each: Object) -> None:
        error = find_error(each)
        if error is not None:
            raise ApiError(422, "Invalid", f"{each['kind']} is invalid: {error}")

    # --- HTTP ------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ApiError as error:
            return web.json_response(error.body, status=error.code)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self.answers.wait()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")
        if self.throttled:
            # https://kubernetes.io/docs/concepts/cluster-administration/flow-control/
            self.throttled -= 1
            error = ApiError(429, "TooManyRequests")
            return web.json_response(error.body, status=429, headers={"Retry-After": "0"})
        parts = request.path.strip("/").split("/")
        parts = parts[parts.index("v1") + 1 :]
        plural, *rest = parts[2:] if parts[0] == "namespaces" else parts
        name = rest[0] if rest else ""
        verb = request.method
        if verb == "GET" and not name:
            verb = "WATCH" if "watch" in request.query else "LIST"
        self.requests[f"{verb} {plural}"] += 1
        refusal = self.refused.get(f"{verb} {plural}")
        if refusal is not None:
            raise refusal
        if request.method == "GET":
            if verb == "WATCH":
                return await self._watch(request, plural)
            if rest[1:] == ["log"]:
                return self._answer_log(request, name)
            return web.json_response(
                self._find(plural, name) if name else self._list(request, plural)
            )
        body = json.loads(await request.text())
        if self.before_write is not None:
            await self.before_write(request.method, name or body["metadata"]["name"])
        if request.method == "POST":
            return web.json_response(self.create(plural, body), status=201)
        if request.method == "PUT":
            status = self._find(plural, name).get("status", {})
            return web.json_response(self.update(plural, {**body, "status": status}))
        if request.method == "PATCH":
            assert request.content_type == "application/merge-patch+json"
            known = copy.deepcopy(self._find(plural, name))
            if "resourceVersion" not in body.get("metadata", {}):
                del known["metadata"]["resourceVersion"]
            return web.json_response(self.update(plural, merge(known, body)))
        return web.json_response(self.delete(plural, name, body))

    def _list(self, request: web.Request, plural: str) -> Object:
        """List in chunks ("Retrieving large results sets in chunks")."""
        version, offset = self._version, 0
        if request.query.get("continue"):
            version, offset = map(int, request.query["continue"].split("-"))
            if version < self._oldest:
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
        found = [
            each
            for _, each in sorted(self.objects[plural].items())
            if matches(each, request.query.get("labelSelector", ""))
        ]
        limit = int(request.query.get("limit", len(found) or 1))
        end = offset + limit
        token = {"continue": f"{version}-{end}"} if end < len(found) else {}
        return {
            "apiVersion": KINDS[plural][0],
            "kind": f"{KINDS[plural][1]}List",
            "metadata": {"resourceVersion": str(version), **token},
            "items": found[offset:end],
        }

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        """Send changes since a version ("Efficient detection of changes")."""
        version = int(request.query["resourceVersion"])
        if version < self._oldest:
            raise ApiError(410, "Expired", f"too old resource version: {version}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        period, wake, history = self._watch_period, asyncio.Event(), self._history
        sent = next((i for i, each in enumerate(history) if each[0] > version), len(history))
        selector = request.query.get("labelSelector", "")
        assert isinstance(request.transport, asyncio.Transport)
        self._transports.add(transport := request.transport)
        try:
            while True:
                wake.clear()
                await self.answers.wait()
                if history is not self._history:  # compacted: this watch has sent all of it
                    history, sent = self._history, 0
                while sent < len(history):
                    _, kind, changed_plural, each = history[sent]
                    sent += 1
                    if changed_plural == plural and (kind == "BOOKMARK" or matches(each, selector)):
                        await _send(response, kind, each)
                self._watchers[wake] = sent
                if period != self._watch_period:
                    break
                await wake.wait()
            if self.expires_watches:  # "410 Gone responses" of a running watch
                await _send(response, "ERROR", ApiError(410, "Expired").body)
        except ConnectionResetError:  # the client has left
            pass
        finally:
            self._watchers.pop(wake, None)
            self._transports.discard(transport)
        return response

    def _answer_log(self, request: web.Request, name: str) -> web.Response:
        self._find("pods", name)
        text = self.read_log(name, request.query.get("previous") == "true")
        if text is None:
            raise ApiError(400, "BadRequest", "the container is waiting to start")
        return web.Response(text=text)


def build_kubeconfig(host: str, port: int, token: str = TOKEN) -> str:
    """Return the content of a kubeconfig file for a server."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://{host}:{port}"}}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    return str(yaml.safe_dump(document))


async def _send(response: web.StreamResponse, kind: str, each: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": each}).encode() + b"\n")


def merge(value: Any, patch: Any) -> Any:  # noqa: ANN401 - any JSON
    """Apply a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), item)
    return merged


def matches(each: Object, selector: str) -> bool:
    """Return whether an object has the labels of a selector of equalities."""
    labels = each["metadata"].get("labels", {})
    pairs = [part.split("=") for part in selector.split(",") if part]
    return all(labels.get(key) == value for key, value in pairs)


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_error(each: dict[str, Any], version: str = LATEST_VERSION) -> str | None:
    """Return why a version of Kubernetes refuses an object, or None. Unknown fields are refused."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", each["apiVersion"])
    errors = _validator(f"{each['kind'].lower()}-{group}", version).iter_errors(each)
    error = next(errors, None)
    return None if error is None else f"{'.'.join(map(str, error.instance_path))}: {error.message}"


@cache
def _validator(name: str, version: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(_read(name, version), registry=_definitions(version))


@cache
def _definitions(version: str) -> jsonschema_rs.Registry:
    content = _read("_definitions", version)
    return jsonschema_rs.Registry([(content["$id"], content)])


def _read(name: str, version: str) -> Any:  # noqa: ANN401 - a schema
    major_minor = ".".join(version.split(".")[:2])
    folder = f"kubernetes-json-schema/v{major_minor}.0-local-strict"
    return msgspec.json.decode(
        files("kubernetes_validate").joinpath(f"{folder}/{name}.json").read_bytes()
    )
