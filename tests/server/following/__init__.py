"""Which files of ours a request passes, in all processes of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.documents import ROOT


@dataclass(frozen=True, slots=True)
class Followed:
    """What ran for a request, as paths below the root of the repository; the earliest first.

    Attributes:
        ran: Files of which a function ran.
        told: Those of which a function was handed what stands for the request's retention.
    """

    ran: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def environment(folder: Path) -> dict[str, str]:
    """What lets a server be followed from `folder`."""
    return {
        "MSDG_TEST_FOLLOWING": str(folder),
        "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}",
    }


@contextmanager
def following(folder: Path) -> Iterator[Followed]:
    """Follow what is asked inside; the lists are full afterwards."""
    followed = Followed()
    (folder / "now").touch()
    try:
        yield followed
    finally:
        (folder / "now").unlink()
    calls = sorted(
        tuple(json.loads(line)) for file in folder.glob("*.calls") for line in file.open()
    )
    for paths, is_enough in ((followed.ran, False), (followed.told, True)):
        seen = dict.fromkeys(path for _, path, _, is_told in calls if is_told >= is_enough)
        paths += [str(Path(path).relative_to(ROOT)) for path in seen]
