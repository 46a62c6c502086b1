"""The mix of retentions that a load run sends."""

from msdg_vllm.request import validate_retention

UNSENT = "default"


def parse_mix(text: str) -> tuple[float | None, ...]:
    """Read `1.0,0.333,default`; None stands for a request that names no retention.

    Naming a retention twice doubles its share. An empty text is a mix of None alone.

    Raises:
        ValueError: An entry is no retention.
    """
    return tuple(_parse(entry.strip()) for entry in text.split(",") if entry.strip()) or (None,)


def _parse(entry: str) -> float | None:
    if entry == UNSENT:
        return None
    try:
        return validate_retention(float(entry))
    except ValueError:
        raise ValueError(
            f"a mix of retentions is a list such as 1.0,0.333,0.111, got {entry!r} in it; "
            f"each must be in (0, 1] or `{UNSENT}`, which sends none"
        ) from None


def show_retention(retention: float | None) -> str:
    """Return the name of a retention in tables and plots."""
    return "no retention sent" if retention is None else f"retention {retention:g}"
