"""The public exceptions.

Their messages name the request, the limit and the value. The server turns `param` and `code` into
OpenAI's error body; Python callers may catch them as the built-in exceptions they derive from.
"""


class InvalidRequestError(ValueError):
    """A request that can never be served as it is.

    It is raised before the request is queued; while the request runs, only where its own fields
    (a grammar, `allowed_token_ids`, `bad_words`) leave no token. `param` is the offending field as
    the client spelt it, `code` a stable machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context window."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFullError(RuntimeError):
    """The waiting queue is at a named limit, or a request waited too long; try again later."""


class RequestFailedError(RuntimeError):
    """One request ended with an error inside the engine; the engine goes on."""


class EngineDeadError(RuntimeError):
    """The engine stopped, closed or failed, and takes no more work."""


class EngineNotStartedError(EngineDeadError):
    """The engine takes no work yet: it was not started, or its model is being loaded."""


class ModelLoadError(RuntimeError):
    """A model folder that cannot be loaded; the message names the file and the key."""


class LoRALoadError(ValueError):
    """An adapter that cannot be served; the message names the file, the tensor and the value."""


class UnsupportedModelError(ModelLoadError):
    """No native family computes this model exactly; transformers' own code may."""


def one_line(error: BaseException) -> str:
    """The message of another library's exception, which may have many lines or none, in one
    line."""
    text = " ".join(str(error).split())
    return f"missing key {text}" if isinstance(error, KeyError) else text or type(error).__name__
