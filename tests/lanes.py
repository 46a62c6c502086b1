"""All tests, in two lanes side by side: `python -m tests.lanes`.

vLLM binds the worker of every engine to the machine's first cores, so that a second engine takes
from the first while other cores are idle. Here each lane has cores of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LANES = (("tests/unit", "tests/server"), ("tests/engine",))
"""Folders of tests, so that both lanes take about as long."""

LOG = Path("build", "tests-engine.log")


def environments(cores: list[int], num_lanes: int) -> list[Mapping[str, str]]:
    """Return what each lane is told of its cores; nothing where there are too few."""
    share = len(cores) // num_lanes
    if not share:
        return [{}] * num_lanes
    own = [cores[lane * share : (lane + 1) * share] for lane in range(num_lanes)]
    return [
        {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, lane)), "OMP_NUM_THREADS": str(share)}
        for lane in own
    ]


def main() -> int:
    """Run both lanes; the second one's words come when it is done."""
    first, second = environments(sorted(os.sched_getaffinity(0)), len(LANES))
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    LOG.parent.mkdir(exist_ok=True)
    print(f"==> {', '.join(LANES[0])} here; {', '.join(LANES[1])} beside, see {LOG}", flush=True)
    start = time.monotonic()
    with LOG.open("wb") as log:
        beside = subprocess.Popen(
            [*pytest, *LANES[1]], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **second}
        )
        try:
            here = subprocess.run([*pytest, *LANES[0]], env={**os.environ, **first}, check=False)
            between = time.monotonic()
            codes = [here.returncode, beside.wait()]
        finally:
            beside.terminate()
    sys.stdout.write(LOG.read_text(errors="replace"))
    minutes = [(moment - start) / 60 for moment in (between, time.monotonic())]
    print(f"==> {minutes[0]:.0f} minutes here, {minutes[1]:.0f} in all", flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    raise SystemExit(main())
