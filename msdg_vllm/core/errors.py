"""The exceptions that msdg-vllm raises on purpose.

    MsdgError
    ├── RetentionError (ValueError)   a retention outside (0, 1], or no number at all
    ├── ProfileError   (ValueError)   an encoder profile that is missing or does not add up
    ├── OptionError    (ValueError)   an option of the method that does not exist
    ├── ShapeError     (ValueError)   states, tokens, masks or a budget that do not fit together
    ├── RequestError   (ValueError)   a request that asks pruning for what it cannot do
    ├── SettingsError  (ValueError)   an operator's setting that is out of range
    ├── CalibrationError              a model or images that no profile can be measured on
    └── UnsupportedVllmError          a vLLM this plugin was not made for

Every message says what is wrong, the value received, what is allowed and what to do.
"""


class MsdgError(Exception):
    """Base of all exceptions raised by msdg-vllm."""


class RetentionError(MsdgError, ValueError):
    """A retention outside (0, 1], or not a number."""


class ProfileError(MsdgError, ValueError):
    """An encoder profile that is unknown, unreadable or inconsistent."""


class OptionError(MsdgError, ValueError):
    """An option of the method that does not exist."""


class ShapeError(MsdgError, ValueError):
    """Tensors, or a budget, that do not fit together."""


class RequestError(MsdgError, ValueError):
    """A request that asks pruning for something it cannot do.

    Attributes:
        parameter: The field of the request that is at fault.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class SettingsError(MsdgError, ValueError):
    """An operator's setting with a value that is not allowed."""


class CalibrationError(MsdgError):
    """A model, images or masks that no profile can be measured on."""


class UnsupportedVllmError(MsdgError):
    """A vLLM version, or a mix of distributions, that this plugin was not made for."""
