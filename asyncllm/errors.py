"""The errors that cross the public border, each with what a client needs to act on it.

They name the request, the limit and the value. HTTP turns `param`, `code` and `status` into the
four-key error body; Python callers catch them as the built-in exceptions that they derive from.
"""


class InvalidRequestError(ValueError):
    """A request that can never be served as it is: known before anything of it is queued, or, of a
    grammar that its own text led to where nothing satisfies it, while it runs.

    `param` is the offending field as the client spelt it, `code` a stable machine-readable word.
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
    """The engine takes no work yet: nobody has started it, or its model is being loaded."""


class ModelLoadError(RuntimeError):
    """A model folder that cannot be loaded; the message names the file and the key."""


class LoRALoadError(ValueError):
    """An adapter that cannot be served; the message names the file, the tensor and the value."""


class UnsupportedModelError(ModelLoadError):
    """A native family would not compute this model exactly; transformers' own code may."""


def one_line(error: BaseException) -> str:
    """Another library's complaint as part of a message of ours: it may have many lines or none."""
    text = " ".join(str(error).split())
    return f"missing key {text}" if isinstance(error, KeyError) else text or type(error).__name__
