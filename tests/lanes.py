"""All tests, in two lanes side by side: `python -m tests.lanes`.

vLLM binds the worker of every engine to the machine's first cores, so that a second engine takes
from the first while other cores are idle. Here each lane has cores of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

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
    """Run both lanes, each folder in a process of its own; the second lane's words come last."""
    first, second = environments(sorted(os.sched_getaffinity(0)), len(LANES))
    LOG.parent.mkdir(exist_ok=True)
    print(f"==> {', '.join(LANES[0])} here; {', '.join(LANES[1])} beside, see {LOG}", flush=True)
    start = time.monotonic()
    with LOG.open("wb") as log, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(_run, LANES[1], second, log)
        codes = _run(LANES[0], first)
        between = time.monotonic()
        codes += beside.result()
    sys.stdout.write(LOG.read_text(errors="replace"))
    minutes = [(moment - start) / 60 for moment in (between, time.monotonic())]
    print(f"==> {minutes[0]:.0f} minutes here, {minutes[1]:.0f} in all", flush=True)
    return next((code for code in codes if code), 0)


def _run(
    folders: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> list[int]:
    pytest, told = [sys.executable, "-m", "pytest", *sys.argv[1:]], {**os.environ, **environment}
    return [
        subprocess.run([*pytest, folder], stdout=log, stderr=log, env=told, check=False).returncode
        for folder in folders
    ]


if __name__ == "__main__":
    raise SystemExit(main())
