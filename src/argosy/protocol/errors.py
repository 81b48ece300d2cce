"""Errors that clients receive: exception and JSON body in the shape of the OpenAI API, and the table of their codes.

The table is the source of docs/reference/errors.md. A test compares it with the codes that the source raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Error response to a client.

    Args:
        status: HTTP status.
        code: Stable, machine-readable code.
        message: What failed and what to change.
        param: Request field that caused the error.
        retry_after_s: Seconds for the `Retry-After` header.
        details: Further fields of the error's body.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = {} if details is None else details

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return _ERROR_TYPES.get(self.status, default_type)

    def encode_body(self, request_id: str) -> bytes:
        """Return the JSON error body in OpenAI's shape, with the request id added."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                    **self.details,
                },
                "request_id": request_id,
            }
        )


def invalid_request(
    message: str, param: str | None = None, code: str = "invalid_value"
) -> ApiError:
    """Return a 400 error for the request field `param`."""
    return ApiError(400, code, message, param=param)


class ErrorCode(NamedTuple):
    """Row of the table, with a stable `code` and its HTTP status."""

    status: int
    code: str
    meaning: str


_MEANINGS = {
    400: {
        "bad_http": "The bytes are not an HTTP/1 request. HTTP/2, TLS on a plain port and the PROXY protocol are"
        " named in the message, and so is an invalid `Host` or `Transfer-Encoding` header. The connection is closed.",
        "invalid_json": "The body is not valid JSON.",
        "invalid_form": "The body is not a valid form (`multipart/form-data`) with one file.",
        "invalid_upload": "The upload was completed or cancelled, or its parts are not the file that was announced.",
        "missing_required_parameter": "A required parameter is missing; `param` names it.",
        "invalid_type": "A parameter has the wrong type; `param` names it.",
        "invalid_value": "A parameter is out of range or unknown; `param` names it.",
        "unknown_parameter": "The parameter does not exist. Remove it.",
        "unsupported_parameter": "The parameter is known but not supported. Remove it.",
        "invalid_schema": "A JSON schema is not valid, exceeds a limit or is satisfied by no document. The message"
        " has the JSON pointer.",
        "unsupported_schema": "A keyword of a JSON schema cannot be enforced; the message has its JSON pointer."
        " Change it, or set `strict` to false.",
        "invalid_grammar": "A grammar, a regular expression, a list of choices or a structural tag does not compile.",
        "grammar_dead_end": "No token can continue the constrained output. The grammar is too complex, or"
        " `allowed_token_ids` and banned tokens exclude everything that it allows.",
        "grammar_failed": "The engine could not compile the grammar of the request, or has no memory for it."
        " Simplify it.",
        "invalid_adapter": "The files of a LoRA adapter are damaged, do not fit the model, or need what is not"
        " supported; the message names the field, tensor or module.",
        "context_length_exceeded": "The prompt and the requested output do not fit the model's context. Shorten the"
        " prompt, lower `max_tokens`, or set `truncate_prompt_tokens`.",
        "unsupported_task": "The model cannot do what the path asks for; the message has what it can do. `GET"
        " /v1/models` lists the `tasks` of each model.",
        "invalid_prompt_variables": "The variables do not fit the prompt of the request. The message says which.",
        "content_refused": "A content rule of the gateway does not accept text in the prompt. The message has the name"
        " of the detector, and never the text.",
        "content_not_filterable": "A content rule filters prompts, and this one consists of token ids. Send text.",
        "unknown_setting": "Between controller and gateway: a rule has a setting that this version does not know."
        " Upgrade the gateway.",
        "adapters_not_supported": "No replica of the base model can load adapters. Request the base model.",
        "no_chat_template": "The model has no chat template for these messages. Use `/v1/completions`, or start the"
        " replica with `--chat-template`.",
        "chat_template_error": "The model's chat template cannot render the messages; the message has the template's"
        " own error.",
        "chat_template_limit_exceeded": "The model's chat template was stopped because it takes too much time or"
        " memory for the messages, or produces too long a prompt. Shorten the conversation.",
        "invalid_idempotency_key": "`Idempotency-Key` must have 1 to 255 visible ASCII characters.",
        "previous_response_not_found": "A response that the request continues is not stored any more. Send the whole"
        " conversation.",
        "unsupported_thread": "The server keeps no threads of messages. Send the whole conversation, as SDKs do"
        " after this error.",
    },
    401: {
        "missing_api_key": "Send an API key as `Authorization: Bearer KEY`.",
        "invalid_api_key": "The API key is unknown or revoked.",
        "expired_api_key": "The API key has expired. Create or rotate a key.",
        "invalid_token": "The JWT is malformed, expired or signed by another issuer.",
        "no_keys_yet": "No API key exists yet, so only direct requests from the gateway's own machine are accepted."
        " Create a key.",
        "project_archived": "The key belongs to an archived project.",
        "session_ended": "The console's session has ended, or its key or user is no longer accepted. Sign in again.",
        "sign_in_failed": "The issuer refused the sign-in to the console, or answered one of another browser.",
        "user_disabled": "The key or token belongs to a disabled user.",
    },
    403: {
        "insufficient_role": "The key's role does not permit this operation.",
        "model_not_allowed": "The key may not use this model.",
        "address_not_allowed": "The client's address is not in an allowed network.",
        "origin_not_allowed": "The browser page's origin is not in `allowed_origins`. No other origin may use"
        " `/admin`, and no page may drain a replica.",
        "insecure_connection": "Signing in to the console over plain HTTP from another machine is not allowed.",
        "no_organisation": "The token names no organisation.",
        "unknown_organisation": "The token names an organisation that does not exist.",
        "no_project": "The token names no project and its user has none.",
        "unknown_project": "The token names a project that does not exist.",
    },
    404: {
        "prompt_not_found": "No prompt of the caller has this name or version. `argosy prompts list` shows them.",
        "model_not_found": "No model has this name; `GET /v1/models` lists the models.",
        "replica_not_found": "No replica has this name.",
        "not_found": "The path or resource does not exist.",
        "no_store": "The gateway has no store, so there is nothing to administer and responses are not kept.",
    },
    405: {
        "method_not_allowed": "The path exists with other methods; see the `allow` header.",
    },
    408: {
        "request_timeout": "The request body did not arrive in time.",
        "timeout": "The request's `timeout_s` ended before the replica had a token.",
    },
    409: {
        "idempotency_key_in_use": "The first request with this idempotency key is still running. Retry later.",
        "conflict": "The admin request conflicts with existing data: a name is taken, a key is revoked or a project"
        " is archived.",
        "file_in_use": "A batch or job needs the file. Cancel it, or wait for its end.",
        "batch_not_cancellable": "The batch has ended already.",
        "other_fleet": "Between controller and gateway: the gateway belongs to another fleet. Check `fleet` in its"
        " settings.",
        "stale_version": "Between controller and gateway: the gateway has a later version of the pools. Another"
        " controller leads.",
        "other_base_model": "The adapter was made for another version of its base model than the one that is served.",
        "other_model": "Between gateway and replica: the replica has another model or another arithmetic (data type,"
        " quantization, kernels, instruction set) than the one that began the response.",
    },
    413: {
        "request_too_large": "The body is too large, the request can never fit a limit, or a non-streaming response"
        " exceeds 64 MiB.",
        "storage_quota_exceeded": "The project would store more bytes of responses, conversations and files than it"
        " may. The message has both numbers. Delete some, send `store` as false, or have the limit on `stored_bytes`"
        " raised.",
    },
    415: {
        "unsupported_encoding": "Compressed bodies are not accepted.",
        "unsupported_media_type": "A body for the admin API or `/drain` needs the header `Content-Type:"
        " application/json`.",
    },
    416: {
        "range_not_satisfiable": "The file ends before the range of the header `Range`.",
    },
    421: {
        "host_not_allowed": "The settings have no console under this host name. Add it to `console.allowed_hosts`.",
    },
    422: {
        "idempotency_key_reused": "The idempotency key was used with another request. Use a new key.",
    },
    429: {
        "rate_limit_exceeded": "A rate limit is used up; see `Retry-After`.",
        "too_many_batches": "The project has 100 batches that have not ended. Wait until one has, or cancel one.",
        "insufficient_quota": "A budget is used up, or running requests hold the rest; see `Retry-After`. Send a"
        " smaller `max_tokens`, or have it raised.",
        "too_many_failures": "The credential is invalid, and this address sent 20 invalid ones within 30 s. Valid"
        " ones still work.",
        "too_many_streams": "Too many windows of the console are open.",
        "too_many_connections": "All connections that the client's address may have run requests; see"
        " `max_connections_per_address`. The connection is closed.",
        "overloaded": "The queue is full for this tier, the wait was too long, or too many calls of the caller or"
        " its organisation wait for the admin API. Or background responses of the tenant take too much memory, or"
        " 64 examinations of prompts run.",
    },
    499: {
        "client_closed_request": "The client disconnected.",
        "cancelled": "The request was cancelled.",
    },
    500: {
        "internal_error": "A fault of the server; its log has the details.",
        "engine_error": "The engine failed on this request.",
    },
    501: {
        "no_blob_store": "The gateway keeps no files. Set `store.blobs` to a folder or a URL that all gateways share.",
        "not_implemented": "The path is that of another API's function that the gateway does not have, such as"
        " Ollama's management of models.",
    },
    502: {
        "upstream_failed": "Every attempt at a replica failed, or a stream broke and no replica could resume it.",
    },
    503: {
        "refused_by_route": "A route of the gateway refuses the request, because of load or a budget. Its operator has"
        " written the message.",
        "overloaded": "More request bodies are arriving than the server keeps in memory (1 GiB; bodies up to 64 KiB"
        " always fit), or more prompts than its render processes can take. For a read of the admin API: it waited"
        " for 10 s.",
        "query_timeout": "A read of the admin API took too long. Choose a shorter time or fewer groups.",
        "no_replica": "No replica serves the model now.",
        "moderation_unavailable": "The moderation model of a content rule has not decided about the prompt. Try again,"
        " or send a shorter prompt.",
        "model_starting": "The model was scaled to zero and starts. `state`, `progress` (0 to 1) and `eta_s` show"
        " how far it is; see `Retry-After`. Stream the response to wait for it.",
        "draining": "The server is shutting down.",
        "engine_unavailable": "The replica is loading its model or restarting its engine, or its engine has failed.",
        "adapter_load_failed": "A LoRA adapter cannot be loaded now: its files cannot be read, or there is no room for"
        " it. Requests for it fail for some seconds, and then it is tried again. The logs have the reason.",
        "limits_unavailable": "Redis is unreachable, and the project's quota failure mode is `closed`.",
        "signing_keys_missing": "The keys that verify tokens have not been fetched yet.",
        "ledger_full": "Usage can be recorded neither in the store nor on disk.",
        "issuer_unavailable": "The issuer for signing in to the console cannot be reached.",
        "store_unavailable": "The store, or the place of the contents of files, cannot be reached.",
    },
    504: {
        "deadline_exceeded": "`timeout_s` ended before the response began.",
    },
    507: {
        "storage_full": "The server has no space for the file. Its operator has to free some.",
    },
}

ERROR_CODES = tuple(
    ErrorCode(status, code, meaning)
    for status, meanings in _MEANINGS.items()
    for code, meaning in meanings.items()
)
"""Sorted by status. `refused_by_replica` is left out: it has the status of the replica's refusal (4xx)."""
