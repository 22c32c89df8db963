"""Errors as HTTP has them: a status, and OpenAI's form of an error."""

from __future__ import annotations

import logging

from gymllm.errors import (
    ClosedError,
    ConfigError,
    ContextLengthError,
    EngineError,
    GymLLMError,
    MissingExtraError,
    ModelError,
)

_log = logging.getLogger(__name__)

RETRY_S = 1
"""What `Retry-After` says: a row is soon free, or another server has been started."""


class RefusedError(GymLLMError):
    """A request is not served; says with which status."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        """Takes the status.

        Args:
            status: Of HTTP.
            message: What was wrong and what to do.
            code: One of OpenAI's words, for programs.
            param: The field that is wrong.
        """
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def as_refusal(error: BaseException) -> RefusedError:
    """The answer to an error; what nobody expected is logged."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ContextLengthError):
        return RefusedError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (ConfigError, ModelError, MissingExtraError)):
        return RefusedError(400, str(error))
    if isinstance(error, (EngineError, ClosedError)):
        return RefusedError(503, str(error), code="engine_error")
    _log.error("a request failed", exc_info=error)
    return RefusedError(500, f"the server has a fault: {type(error).__name__}; its log says more.")


def error_body(refusal: RefusedError) -> dict[str, object]:
    """OpenAI's form of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status)
    kind = kind or ("server_error" if refusal.status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": str(refusal),
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def error_headers(refusal: RefusedError) -> dict[str, str]:
    """When to come again, and how to show a key."""
    if refusal.status in (429, 503):
        return {"Retry-After": str(RETRY_S)}
    return {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
