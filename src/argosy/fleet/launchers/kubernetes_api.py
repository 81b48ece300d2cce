"""Client of the API of a Kubernetes cluster by kubernetes-asyncio, and a copy of objects that a watch keeps."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from argosy.extras import install_command
from argosy.fleet.launchers.kubernetes_objects import KubernetesObject
from argosy.fleet.launchers.launcher import LaunchError

if TYPE_CHECKING:
    import aiohttp
    from kubernetes_asyncio.client.api_client import ApiClient

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
WATCH_TIMEOUT_S = 240
"""Time after which the server ends a watch."""
MAX_SILENCE_S = 70.0
"""Time without a byte of a watch after which its connection counts as lost. Bookmarks come about once a minute."""
MIN_RENEWAL_INTERVAL_S = 10.0
"""Time after which a refused token makes the client read its settings again."""
LIST_LIMIT = 500
MAX_TRIES = 6
MAX_RETRY_AFTER_S = 10.0
MERGE_PATCH = "application/merge-patch+json"

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 5.0
REFUSED_RETRY_DELAY_S = 20.0
"""Time after which a list or watch that the API refuses, such as for a missing right, is tried again."""

_LACKS_RIGHT = re.compile(r"User \".*\" cannot \w+ resource")
"""Refusal by the rights of a user (RBAC). Quotas and policies refuse with the same status."""

Query = Mapping[str, str | int]


class KubernetesApiError(LaunchError):
    """Raised if the API refuses a request.

    Args:
        reason: Its reason in one word, such as `AlreadyExists`.
    """

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubernetesApi:
    """Client of one cluster. Not thread-safe: use it from one event loop.

    All methods raise `KubernetesApiError` if the API refuses the request, and `LaunchError` if it cannot be reached.
    A request that the API rejects because it is overloaded is repeated after the time that it states.

    Args:
        context: Context of the kubeconfig file. None for its current one, or for the service account of this pod.
    """

    def __init__(self, context: str | None = None) -> None:
        self._context = context
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        self._renewed_at = -math.inf
        self._replaced: list[tuple[float, ApiClient]] = []
        """Clients whose token was refused, with the time. Watches that began before it still use their connections."""

    async def request(
        self,
        method: str,
        path: str,
        body: KubernetesObject | None = None,
        *,
        query: Query | None = None,
    ) -> KubernetesObject:
        """Get, create (POST in a collection), replace (PUT) or delete an object, or change fields of it (PATCH).

        With a `resourceVersion` only that version of it is replaced or changed (409 otherwise).
        """
        content = await self._read(await self._send(method, path, body, query=query))
        try:
            decoded: KubernetesObject = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise self._unreachable(error) from error
        return decoded

    async def find(self, path: str) -> KubernetesObject | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self.request("GET", path)
        except KubernetesApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, path: str, selector: str) -> tuple[list[KubernetesObject], str]:
        """Return all objects with the labels, and the version of the collection from which to watch."""
        while True:
            objects: list[KubernetesObject] = []
            query: dict[str, str | int] = {"labelSelector": selector, "limit": LIST_LIMIT}
            try:
                while True:
                    page = await self.request("GET", path, query=query)
                    objects += page["items"]
                    query["continue"] = page["metadata"].get("continue", "")
                    if not query["continue"]:
                        return objects, page["metadata"]["resourceVersion"]
            except KubernetesApiError as error:
                if error.status != 410 or "continue" not in query:
                    raise  # otherwise the continue token is too old

    async def delete(self, path: str, options: KubernetesObject) -> None:
        """Delete an object, unless it does not exist."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self.request("DELETE", path, body)
        except KubernetesApiError as error:
            if error.status != 404:
                raise

    async def read_text(self, path: str, query: Query) -> bytes:
        """Return a response that is not an object, such as a log."""
        return await self._read(await self._send("GET", path, query=query))

    async def watch(
        self, path: str, selector: str, version: str
    ) -> AsyncIterator[tuple[str, KubernetesObject]]:
        """Yield the changes since a version, each with its type, until the server ends the watch.

        See https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. The first item
        has the type CONNECTED and no object.
        """
        query: Query = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_TIMEOUT_S,
        }
        async with await self._send("GET", path, query=query, is_watch=True) as response:
            yield "CONNECTED", {}
            while True:
                try:
                    # The timeout of the library ends with its session, and a line would be awaited for ever.
                    async with asyncio.timeout(MAX_SILENCE_S):
                        line = await response.content.readline()
                    if not line:
                        return
                    event = msgspec.json.decode(line)
                except TimeoutError:
                    raise self._unreachable(f"a watch is silent for {MAX_SILENCE_S:g} s") from None
                except _response_errors() as error:
                    raise self._unreachable(error) from error
                if event["type"] == "ERROR":
                    raise _to_error(int(event["object"].get("code", 500)), event["object"])
                yield event["type"], event["object"]

    async def close(self) -> None:
        """Close all connections."""
        clients = [client for _, client in self._replaced]
        if self._client is not None:
            clients.append(self._client)
        self._client, self._replaced = None, []
        for client in clients:
            await client.close()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with response:
                return await response.read()
        except _response_errors() as error:
            raise self._unreachable(error) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: KubernetesObject | None = None,
        *,
        query: Query | None = None,
        is_watch: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send a request until it is neither throttled nor refused for an expired token."""
        client = await self._connect()
        from aiohttp import ClientTimeout

        timeout = (
            ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=MAX_SILENCE_S)
            if is_watch
            else ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        )
        content_type = MERGE_PATCH if method == "PATCH" else "application/json"
        tries = 0
        while True:
            tries += 1
            try:
                response: aiohttp.ClientResponse = await client.call_api(
                    path,
                    method,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=timeout,
                )
            except _response_errors() as error:
                raise self._unreachable(error) from error
            if response.status < 400:
                return response
            content = await self._read(response)
            retry_after_s = _parse_retry_after(response)
            if response.status == 401 and tries == 1:
                client = await self._renew(client)
            elif retry_after_s is None or tries == MAX_TRIES:
                raise _parse_error(response.status, content)
            else:
                await asyncio.sleep(min(retry_after_s, MAX_RETRY_AFTER_S))

    async def _connect(self) -> ApiClient:
        """Return the client. The settings are read at its first use, and again after `close`."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._create_client()
            return self._client

    async def _renew(self, refused: ApiClient) -> ApiClient:
        """Return a client with the token that the settings contain now, in place of one whose token was refused.

        The refused one is closed later, because closing it would silence the watches of other tasks.
        """
        now = asyncio.get_running_loop().time()
        async with self._connecting:
            if self._client is refused and now - self._renewed_at >= MIN_RENEWAL_INTERVAL_S:
                self._renewed_at = now
                self._client = await self._create_client()
                self._replaced.append((now, refused))
            unused = [
                each for each in self._replaced if now - each[0] > WATCH_TIMEOUT_S + MAX_SILENCE_S
            ]
            for each in unused:
                self._replaced.remove(each)
                await each[1].close()
        return await self._connect()

    async def _create_client(self) -> ApiClient:
        try:
            from kubernetes_asyncio.client.api_client import ApiClient
            from kubernetes_asyncio.client.configuration import Configuration
            from kubernetes_asyncio.config import (
                ConfigException,
                load_incluster_config,
                load_kube_config,
            )
        except ImportError as error:
            raise LaunchError(
                f"pools on Kubernetes need a further package; install it with: {install_command('kubernetes')}"
            ) from error
        configuration = Configuration()
        file = os.environ.get("KUBECONFIG") or "~/.kube/config"
        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        has_file = "KUBECONFIG" in os.environ or Path(file).expanduser().exists()  # noqa: ASYNC240 - once
        try:
            if is_pod and not has_file and self._context is None:
                load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await load_kube_config(file, self._context, configuration)
        except (ConfigException, OSError, ValueError) as error:
            raise LaunchError(
                f"no Kubernetes cluster is configured: {error}; set KUBECONFIG, or `kubernetes.context`"
            ) from error
        return ApiClient(configuration)

    def _unreachable(self, error: Exception | str) -> LaunchError:
        host = "" if self._client is None else f" at {self._client.configuration.host}"
        reason = str(error) or type(error).__name__
        return LaunchError(f"the Kubernetes API{host} cannot be reached: {reason}")


def _response_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a connection and of a response that is cut off. The library is imported late."""
    from aiohttp import ClientError

    return ClientError, OSError, TimeoutError, msgspec.DecodeError


def _parse_retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Return the seconds after which the API permits the request again, or None.

    See https://kubernetes.io/docs/concepts/cluster-administration/flow-control/.
    """
    value = response.headers.get("Retry-After", "")
    is_temporary = response.status in {429, 500, 503, 504}
    return float(value) if is_temporary and value.isdigit() else None


def _parse_error(status: int, content: bytes) -> KubernetesApiError:
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        body = {"message": content[:200].decode(errors="replace")}
    return _to_error(status, body)


def _to_error(status: int, body: Mapping[str, Any]) -> KubernetesApiError:
    message = f"the Kubernetes API answers {status}: {body.get('message') or 'no message'}"
    if status == 401:
        message += "; it refuses the token of this client: renew it in the kubeconfig file, or restart the pod"
    elif status == 403 and _LACKS_RIGHT.search(message):
        message += "; the role in `argosy render kubernetes` has the rights that are needed"
    return KubernetesApiError(status, message, str(body.get("reason", "")))


class KubernetesCache:
    """Objects by name, as the server reports their changes. Not thread-safe: use it from one event loop.

    Args:
        on_changed: Called after each change.
    """

    def __init__(
        self, api: KubernetesApi, path: str, selector: str, on_changed: Callable[[], None]
    ) -> None:
        self.objects: dict[str, KubernetesObject] = {}
        self.error: str = ""
        """Why the server cannot be watched at present; empty if it can."""
        self.synced = asyncio.Event()
        """Set once the objects have been listed, or could not be."""
        self._api = api
        self._path = path
        self._selector = selector
        self._on_changed = on_changed
        self._version = ""
        self._known_at = 0.0
        """When the objects were last known to be those of the server, if there is an error. 0 before the first list."""
        self._removed: set[str] = set()
        """UIDs of objects that this process deleted, of which late events may still arrive."""

    def update(self, each: KubernetesObject) -> None:
        """Store an object as the server returned it, unless a newer version is known.

        Resource versions of one kind are integers that grow. The API promises that since version 1.35, and has always
        done so. See https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions.
        """
        metadata = each["metadata"]
        known = self.objects.get(metadata["name"])
        if metadata["uid"] in self._removed:
            return
        if known is None or _version(known) < _version(each):
            self.objects[metadata["name"]] = each
            self._on_changed()

    def remove(self, each: KubernetesObject) -> None:
        """Forget an object that this process has deleted."""
        self._removed.add(each["metadata"]["uid"])
        self._forget(each["metadata"])

    async def run(self) -> None:
        """Follow the changes until cancelled."""
        delay_s = MIN_RETRY_DELAY_S
        while True:
            try:
                if not self._version:
                    await self._list()
                async for kind, each in self._api.watch(self._path, self._selector, self._version):
                    self._apply(kind, each)
            except KubernetesApiError as error:
                self._version = ""  # 410 says that the server has forgotten the changes since then
                if error.status != 410:
                    self._fail(error)
                if error.status in {401, 403}:
                    await asyncio.sleep(REFUSED_RETRY_DELAY_S)
            except LaunchError as error:
                self._version = ""  # what was missed meanwhile is listed
                self._fail(error)
            delay_s = min(2 * delay_s, MAX_RETRY_DELAY_S) if self.error else MIN_RETRY_DELAY_S
            await asyncio.sleep(delay_s)

    async def _list(self) -> None:
        objects, version = await self._api.list(self._path, self._selector)
        self.objects = {
            each["metadata"]["name"]: each
            for each in objects
            if each["metadata"]["uid"] not in self._removed
        }
        self._removed &= {each["metadata"]["uid"] for each in objects}
        self._version = version
        self._known_at = time.time()
        self.synced.set()
        self._on_changed()

    def _apply(self, kind: str, each: KubernetesObject) -> None:
        if self.error:
            self.error = ""
            self._on_changed()
        if kind == "CONNECTED":
            return
        self._version = each["metadata"]["resourceVersion"]
        if kind in {"ADDED", "MODIFIED"}:
            self.update(each)
        elif kind == "DELETED":
            self._removed.discard(each["metadata"]["uid"])
            self._forget(each["metadata"])

    def _forget(self, metadata: KubernetesObject) -> None:
        known = self.objects.get(metadata["name"])
        if known is not None and known["metadata"]["uid"] == metadata["uid"]:
            del self.objects[metadata["name"]]
            self._on_changed()

    def _fail(self, error: LaunchError) -> None:
        if self._known_at and not self.error:
            self._known_at = time.time()
        self.error = str(error)
        if self._known_at:
            known = datetime.fromtimestamp(self._known_at, tz=UTC)
            self.error += f"; what is known of the cluster is of {known:%H:%M:%S} UTC"
        self.synced.set()
        self._on_changed()


def _version(each: KubernetesObject) -> int:
    return int(each["metadata"]["resourceVersion"])
