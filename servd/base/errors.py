"""The exception tree, and what each error means to a client.

ServdError
├── RequestError                 the request is at fault: 4xx, nothing else is affected
│   ├── InvalidRequest           400
│   │   └── ContextTooLong       400, code context_length_exceeded
│   ├── Unauthorized             401
│   ├── Forbidden                403
│   ├── NotFound                 404
│   │   └── UnknownModel         404, code model_not_found
│   ├── DeadlineExceeded         504: its own deadline passed
│   └── Overloaded               429, with Retry-After
│       ├── RateLimited          429: its API key has reached a limit
│       └── Unavailable          503: the server is loading or shutting down
│           └── StoreUnavailable 503, code store_unavailable: the database of responses fails
├── EngineError                  the server is at fault: 500
│   ├── EngineDeadError          503: the engine process died
│   └── ShuttingDown             503, code shutting_down: the server ends before the answer does
└── ConfigError                  a flag, a file or the machine: one line on stderr, exit code 2
    ├── ModelNotFound
    ├── UnsupportedModel
    └── NotEnoughMemory
"""

from collections.abc import Mapping
from typing import ClassVar


class ServdError(Exception):
    """Any error that servd raises on purpose. The message states the problem and its solution."""


class RequestError(ServdError):
    """A request that cannot be served as asked. The message states the problem and a valid
    alternative, with numbers. `param` is the invalid field, as the client wrote it. `code` is
    machine-readable, where OpenAI defines one.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str | None] = None
    headers: Mapping[str, str] = {}  # sent with the answer

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(RequestError):
    """400: a field is missing, malformed or out of bounds."""


class ContextTooLong(InvalidRequest):
    """400: prompt plus max_tokens exceed the model's context. `num_tokens` is the number of the
    prompt's tokens, or a lower bound, and `max_tokens` the number that a prompt may have.
    """

    default_code = "context_length_exceeded"

    def __init__(
        self, message: str, num_tokens: int = 0, max_tokens: int = 0, *, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Unauthorized(RequestError):
    """401: the API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """403: the API key or the origin of the page does not permit this request."""

    status = 403
    type = "permission_error"
    default_code = "insufficient_scope"


class NotFound(RequestError):
    """404: the route or object does not exist."""

    status = 404
    type = "not_found_error"


class UnknownModel(NotFound):
    """404: the `model` of the request is not served here."""

    default_code = "model_not_found"


DEADLINE_PASSED = (
    "the deadline of the request passed before its answer was whole: ask for less, or raise "
    "`timeout`"
)


class DeadlineExceeded(RequestError):
    """504: the deadline of the request (`timeout`) passed before it was answered."""

    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"
    headers: Mapping[str, str] = {"x-should-retry": "false"}  # by default OpenAI's SDKs retry

    def __init__(self, message: str = DEADLINE_PASSED) -> None:
        super().__init__(message)


class Overloaded(RequestError):
    """429: the queue is too long to admit the request. `retry_after` is in seconds."""

    status = 429
    type = "overloaded_error"
    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = {"Retry-After": str(retry_after)}


class RateLimited(Overloaded):
    """429: the API key reached its limit of concurrent requests or requests per minute."""

    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Unavailable(Overloaded):
    """503: the server is loading the model or shutting down."""

    status = 503


class StoreUnavailable(Unavailable):
    """503: the database of stored responses cannot be read or written."""

    type = "server_error"
    default_code = "store_unavailable"


class EngineError(ServdError):
    """500: the engine failed on this request. The client is not at fault."""


class EngineDeadError(EngineError):
    """503: the engine process died. Every open request ends with this error."""


class ShuttingDown(EngineError):
    """503: the server is shutting down. Every open request ends with this error."""


class ConfigError(ServdError):
    """A flag, a configuration file or the machine prevents servd's start. Exit code 2."""


class ModelNotFound(ConfigError):
    """The model folder or hub repository does not exist, is unreachable or lacks a file."""


class UnsupportedModel(ConfigError):
    """The architecture in config.json has no file in servd/worker/models/."""


class NotEnoughMemory(ConfigError):
    """Weights or KV cache do not fit. The message has the required and the available memory."""
