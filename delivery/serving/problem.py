"""Problem: a refusal, in the shape that OpenAI clients read."""

from __future__ import annotations

from typing import Any

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client left; nobody reads it but logs and metrics."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class Problem(Exception):
    """An HTTP refusal: status, a stable code, a sentence, and the parameter at fault where there is one."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least 1; `WWW-Authenticate` with a 401."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers
