"""Several processes share one view of the load, and a dead one leaves none behind."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.adaptive.controller import Arrival, Controller, Image
from server.adaptive.state import SharedLoad

# Another API process: it sends five requests, says so, and waits to be killed.
OTHER_PROCESS = """
import sys, time
from pathlib import Path
from server.adaptive.controller import Arrival, Controller, Image
from server.adaptive.state import SharedLoad

controller = Controller(SharedLoad(Path(sys.argv[1])), target=1.0, floor=0.111, ceiling=1.0)
for number in range(5):
    controller.arrive(Arrival(1000, 2880, [Image(number + 1, 2880)]), float(sys.argv[2]))
print("sent", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = SharedLoad.create()
    yield path
    path.unlink()


def make_controller(path: Path) -> Controller:
    return Controller(SharedLoad(path), target=1.0, floor=0.111, ceiling=1.0)


def test_processes_see_each_others_load_until_they_die(path: Path) -> None:
    controller = make_controller(path)
    assert controller.status(1000.0).backlog_seconds == 0
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(path), "1000.0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "sent"
    assert controller.status(1000.5).backlog_seconds > 0
    other.kill()
    other.wait()
    assert controller.status(1002.0).backlog_seconds == 0


def test_an_image_is_remembered_across_processes(path: Path) -> None:
    image = [Image(7, 2880)]
    first = make_controller(path).arrive(Arrival(10, 2880, image), 1.0)
    second = make_controller(path).arrive(Arrival(10, 2880, image), 2.0)
    assert second.retentions == first.retentions
    assert second.reasons == ["sticky"]


def test_what_is_forgotten_while_the_load_is_held_is_released_later(path: Path) -> None:
    load = SharedLoad(path)
    controller = Controller(load, target=1.0, floor=0.111, ceiling=1.0)
    decision = controller.arrive(Arrival(1000), 1.0)

    def forget() -> None:
        # As when the garbage collector runs in the middle of another call.
        with load.locked():
            controller.abandon(decision.reservation)

    forgetting = threading.Thread(target=forget, daemon=True)
    forgetting.start()
    forgetting.join(timeout=10)
    assert not forgetting.is_alive(), "it waits for itself"
    assert controller.status(1.0).backlog_seconds == 0
