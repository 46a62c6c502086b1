"""What holds for every engine of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def every_method() -> Iterator[None]:
    """Let requests name every method: operators allow fewer unless they say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSDG_METHODS", "all")
        yield
