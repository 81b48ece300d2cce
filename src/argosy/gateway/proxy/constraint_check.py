"""Checks of a request before it is queued, as its replica would check them: prompt, constraint, tools, parameters."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from argosy import constraints
from argosy.deployment import BackendKind
from argosy.gateway.backends import (
    CHAT_PATH,
    CONSTRAINT_FIELDS,
    BackendAdapter,
    count_resume_tokens,
    translate_constraint,
)
from argosy.gateway.pool import Pool
from argosy.gateway.request_context import ApiShape
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    check_parameters,
    invalid_request,
    normalize_stop_strings,
    parse_request_body,
    unsupported_task_error,
)

CHECKED_FIELDS = (*constraints.TOOL_FIELDS, *sorted(CONSTRAINT_FIELDS))
_CHECKED_NAMES = frozenset(CHECKED_FIELDS)
UNCHECKED_FIELDS = frozenset({"messages", "prompt", "resume", *CHECKED_FIELDS})
"""Fields that `check_queued_parameters` does not read."""
RESUMABLE_KINDS = frozenset[BackendKind]({"argosy", "auto"})
"""Kinds of servers that may support `resume`: native replicas, and servers whose kind is not yet detected."""
CHECK_TIMEOUT_S = 0.5
"""A request whose check takes longer, because others are ahead of it, is checked by its replica only."""
MAX_PENDING_CHECKS = 64
"""Checks that may run or wait. Further requests are checked by their replicas only."""
MAX_CACHED_RESULTS = 1024
MAX_THREADS = 2

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


def check_task(pool: Pool, model: str, api: ApiShape) -> None:
    """Check that a model, by its name in a request, has one of the API's tasks. Raises ApiError(400) if not."""
    for replica in pool.replicas.values():
        if replica.tasks is None or not replica.tasks.isdisjoint(api.tasks):
            return
    if pool.tasks is not None:
        raise unsupported_task_error(model, api.path.decode(), pool.tasks)


def check_prompt(pool: Pool, fields: RequestFields) -> None:
    """Check that the prompt fits the model, and that `resume` finds a replica that supports it.

    Raises:
        ApiError(400): No replica of the pool could serve the request.
    """
    max_model_len = pool.max_model_len
    if max_model_len is not None and fields.exceeds_token_limit(max_model_len):
        # OpenAI's status and wording, by which clients recognise that the prompt is too long.
        message = (
            f"This model's maximum context length is {max_model_len} tokens, and the prompt is longer. "
            "Send a shorter one, or truncate it with truncate_prompt_tokens."
        )
        raise invalid_request(message, fields.prompt_field, "context_length_exceeded")
    if count_resume_tokens(fields) and not _can_resume(pool):
        message = (
            "Only Argosy replicas support 'resume', and this model has none. "
            "Send the tokens as text in the prompt."
        )
        raise invalid_request(message, "resume")


def _can_resume(pool: Pool) -> bool:
    """Return whether a replica of the pool supports `resume`, or may turn out to support it."""
    kinds = {replica.kind for replica in pool.replicas.values()}
    return not kinds or not kinds.isdisjoint(RESUMABLE_KINDS)


def find_unsupporting_replicas(pool: Pool, fields: RequestFields, path: bytes) -> set[str]:
    """Return the names of the replicas that do not enforce the constraint of the request.

    These are replicas of the pool, and of the pool that may take the request over.

    Raises:
        ApiError(400): None of these replicas enforces it, or it is malformed.
    """
    if fields.raw.keys().isdisjoint(CONSTRAINT_FIELDS):
        return set()
    replicas = {**pool.replicas, **({} if pool.takeover is None else pool.takeover.replicas)}
    errors: dict[BackendKind, ApiError | None] = {}
    for replica in replicas.values():
        if replica.kind not in errors:
            errors[replica.kind] = _find_translation_error(fields, path, replica.adapter)
    supported = [kind for kind, error in errors.items() if error is None]
    if errors and not supported:
        raise next(error for error in errors.values() if error is not None)
    return {name for name, replica in replicas.items() if replica.kind not in supported}


def check_queued_parameters(pool: Pool, fields: RequestFields, path: bytes) -> None:
    """Check the types and ranges of a request's parameters, if all replicas of its pool are native.

    For requests that would wait for a replica. Otherwise the replica checks them at once. The prompt is left to it, and
    so are fields that `NativeRequestChecker` checks.

    Raises:
        ApiError(400): A replica would refuse the request. `param` names the field.
    """
    if not _has_only_native_replicas(pool):
        return
    is_chat = path == CHAT_PATH
    prompt = {"messages": Raw(b"[]")} if is_chat else {"prompt": Raw(b'""')}
    body = {name: fields.raw[name] for name in fields.raw.keys() - UNCHECKED_FIELDS} | prompt
    request_type = ChatCompletionRequest if is_chat else CompletionRequest
    request, _ = parse_request_body(request_type, msgspec.json.encode(body))
    check_parameters(msgspec.structs.asdict(request))
    normalize_stop_strings(request.stop)


def _has_only_native_replicas(pool: Pool) -> bool:
    return {replica.kind for replica in pool.replicas.values()} == {"argosy"}


def _find_translation_error(
    fields: RequestFields, path: bytes, adapter: BackendAdapter
) -> ApiError | None:
    try:
        translate_constraint(fields.raw, path, adapter)
    except ApiError as error:
        return error
    return None


class NativeRequestChecker:
    """Checks requests to native replicas: grammars must compile, and tools must be well-formed.

    Grammars are compiled in threads, and the results of the latest checks are kept.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="constraint-check")
        self._results: OrderedDict[bytes, asyncio.Future[ApiError | None]] = OrderedDict()
        """Error by digest of the fields; None for valid fields."""
        self._num_pending = 0

    async def check(self, pool: Pool, fields: RequestFields, path: bytes) -> None:
        """Check a request, if all replicas of its pool are native.

        Raises:
            ApiError(400): A replica would refuse the request. `param` names the field.
        """
        if _CHECKED_NAMES.isdisjoint(fields.raw) or not _has_only_native_replicas(pool):
            return
        raw = {name: fields.raw[name] for name in CHECKED_FIELDS if name in fields.raw}
        result = self._find_result(raw, path)
        if result is None:
            return
        if not result.done():
            await asyncio.wait({result}, timeout=CHECK_TIMEOUT_S)
        error = result.result() if result.done() else None
        if error is not None:
            # A new one, because a raised error refers to the frames of its request.
            raise ApiError(error.status, error.code, error.message, param=error.param)

    def _find_result(
        self, raw: Mapping[str, Raw], path: bytes
    ) -> asyncio.Future[ApiError | None] | None:
        """Return the result for these fields, from an earlier check if possible; None if too many are pending."""
        digest = hashlib.blake2b(path, digest_size=16)
        for name, value in raw.items():
            digest.update(b"%b %d " % (name.encode(), len(bytes(value))))
            digest.update(bytes(value))
        key = digest.digest()
        result = self._results.get(key)
        if result is None:
            if self._num_pending >= MAX_PENDING_CHECKS:
                return None
            self._num_pending += 1
            check = partial(find_native_error, dict(raw), is_chat=path == CHAT_PATH)
            result = asyncio.get_running_loop().run_in_executor(self._executor, check)
            result.add_done_callback(self._on_check_done)
            self._results[key] = result
            if len(self._results) > MAX_CACHED_RESULTS:
                self._results.popitem(last=False)
        else:
            self._results.move_to_end(key)
        return result

    def _on_check_done(self, result: asyncio.Future[ApiError | None]) -> None:
        del result
        self._num_pending -= 1


def find_native_error(raw: Mapping[str, Raw], *, is_chat: bool) -> ApiError | None:
    """Return the error with which a native replica would refuse these fields, or None."""
    try:
        fields = {name: _decode(name, value) for name, value in raw.items()}
        constraints.read_constraint(fields)
        if is_chat:
            for tool in constraints.read_tools(fields).callable_tools:
                if tool.strict:
                    constraints.schema_grammar(
                        tool.parameters, strict=True, param=tool.schema_param
                    )
    except ApiError as error:
        # Without the traceback, which refers to all of the fields.
        return ApiError(error.status, error.code, error.message, param=error.param)
    except Exception:
        log.exception("constraint_check_failed")  # the replica checks the request again
    return None


def _decode(name: str, value: Raw) -> Any:  # noqa: ANN401 - JSON value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"'{name}' is not valid JSON, or nested too deeply. Correct it."
        raise invalid_request(message, name, "invalid_json") from error
