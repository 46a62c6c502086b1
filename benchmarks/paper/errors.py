"""What can go wrong, each with a message that says what to do."""


class PaperError(Exception):
    """Base of all: the command prints it and ends with status 1.

    PaperError
        ServerError       the server is down, or serves something else
        EvaluationError   lmms-eval is missing, failed, or reported something unusable
    """


class ServerError(PaperError):
    """The server is not there or is not the one the table needs."""


class EvaluationError(PaperError):
    """lmms-eval could not do its part."""
