"""What can go wrong on lmms-eval's side."""


class EvaluationError(Exception):
    """lmms-eval is missing, failed, or reported something unusable; the text says what to do."""
