"""Exception and JSON body of all errors that a client receives, in the shape of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping

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
