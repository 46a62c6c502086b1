"""Which documents of a data set a task asks about; called by lmms-eval."""

from typing import Any


def only_images(documents: Any) -> Any:
    """Keep what SEED-Bench asks about images, not about videos."""
    # The column alone decides, so that no picture is decoded for it.
    kinds = documents["data_type"]
    return documents.select([number for number, kind in enumerate(kinds) if kind == "image"])
