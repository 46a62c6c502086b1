"""A short load on this server, and a report of it: what `make bench` runs.

    python -m benchmarks.load run                                  # serves the bundled model itself
    python -m benchmarks.load run --host http://127.0.0.1:8000     # loads a server that is up
    python -m benchmarks.load report --folder benchmarks/runs/load
    python -m benchmarks.load target                               # does the server hold a target?
    python -m benchmarks.load simulate --costs gpu                 # the same on a queue, in seconds

`run` writes into the folder: answers.json (every answer), stats_*.csv (locust's tables),
report.html (plots by retention) and locust.html (locust's own report over time).
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.load.html_report import write_report
from benchmarks.load.outcomes import Outcome, plot, table
from benchmarks.load.shapes import SHAPES, arrival_times, overload_end
from benchmarks.load.simulation import COSTS, simulate
from benchmarks.load.target import measure_rate, send, watch_recovery
from benchmarks.serving import midsize
from benchmarks.shared.client import Client, ServerError
from benchmarks.shared.provenance import ROOT, RUNS, provenance
from benchmarks.shared.server_process import PRUNING_SERVER, StartError, running

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
FOLDER = RUNS / "load"
BUNDLED = ROOT / "models" / "scenes-llava"
BUNDLED_OPTIONS = ("--model", str(BUNDLED), "--served-model-name", BUNDLED.name)
# The bundled model is on disk and small: no network, and not most of the memory for its KV cache.
BUNDLED_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ANSWERS, SOURCE, REPORT = "answers.json", "source.json", "report.html"


def locust_command(arguments: argparse.Namespace, host: str) -> list[str]:
    """Return the command that sends the load, bounded in time and number."""
    folder: Path = arguments.folder
    return [
        *(
            sys.executable,
            "-m",
            "locust",
            "--locustfile",
            str(LOCUSTFILE),
        ),
        *("--host", host, "--headless", "--only-summary"),
        *("--users", str(arguments.users), "--spawn-rate", str(arguments.users)),
        *("--run-time", arguments.time, "--stop-timeout", "60"),
        *("--max-conversations", str(arguments.conversations)),
        *("--retention", arguments.retention),
        *("--answers-file", str(folder / ANSWERS)),
        *("--csv", str(folder / "stats"), "--html", str(folder / "locust.html")),
    ]


def run(arguments: argparse.Namespace) -> int:
    """Start the server unless one is named, send the load, write the report."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANSWERS).unlink(missing_ok=True)
    with ExitStack() as stack:
        host = arguments.host
        if host is None:
            log = folder / "server.log"
            print(f"==> Starting the server on {BUNDLED.name} (log: {log})", flush=True)
            environment = {
                name: text for name, text in BUNDLED_ENVIRONMENT.items() if name not in os.environ
            }
            server = running(PRUNING_SERVER, BUNDLED_OPTIONS, log, environment)
            host = stack.enter_context(server).url
        print(f"==> Sending {arguments.users} users to {host} for {arguments.time}", flush=True)
        done = subprocess.run(locust_command(arguments, host), cwd=ROOT, check=False)
    if not (folder / ANSWERS).is_file():
        print("load: locust wrote no answers, see above", file=sys.stderr)
        return done.returncode or 1
    source = {
        "command": shlex.join(["python", "-m", "benchmarks.load", *arguments.words]),
        "endpoint": arguments.host or f"{BUNDLED.name}, started for this run",
        **provenance(),
    }
    (folder / SOURCE).write_text(json.dumps(source, indent=1) + "\n")
    report(arguments)
    return done.returncode


def report(arguments: argparse.Namespace) -> int:
    """Write the report of a run that is over."""
    folder: Path = arguments.folder
    answers = json.loads((folder / ANSWERS).read_text())
    if not answers:
        print(f"load: {folder / ANSWERS} holds no answer; nothing to report", file=sys.stderr)
        return 1
    source = json.loads((folder / SOURCE).read_text())
    print(write_report(answers, source, folder / REPORT))
    print(f"==> Report: {folder / REPORT}; locust's own: {folder / 'locust.html'}")
    return 0


def hold_target(arguments: argparse.Namespace) -> int:
    """Send one load three times: all tokens, the fewest, and as many as the server chooses."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        host = arguments.host
        if host is None:
            log = folder / "server.log"
            print(f"==> Starting the server on the mid-size model (log: {log})", flush=True)
            options = ["--model", str(midsize.build()), "--served-model-name", "midsize"]
            options += ["--no-enable-prefix-caching", "--max-model-len=2048"]
            options += [f"--target-ttft={arguments.target}", f"--min-retention={arguments.floor}"]
            server = running(PRUNING_SERVER, options, log, BUNDLED_ENVIRONMENT)
            host = stack.enter_context(server).url
        client = Client(host)
        model = client.models()[0]["id"]
        rate = measure_rate(client, model)
        times = arrival_times(arguments.shape, rate, arguments.seconds, arguments.seed)
        print(f"==> {rate:.2f} unpruned requests a second; {len(times)} requests each", flush=True)
        results: dict[str, list[Outcome]] = {}
        facts: dict[str, object] = {"unpruned_requests_per_second": rate}
        end = overload_end(arguments.shape, arguments.seconds)
        for number, (policy, retention) in enumerate(_policies(arguments)):
            print(f"==> {policy}", flush=True)
            load = partial(send, client, model, times, retention, number * len(times))
            if retention is not None or end is None:
                results[policy] = load()
                continue
            results[policy], recovery = watch_recovery(client, load, end)
            facts["recovery_seconds"] = recovery
            said = "not within 30 targets" if recovery is None else f"after {recovery:.0f} s"
            print(f"==> Back at the ceiling {said} of the end of the overload", flush=True)
    return _report_target(arguments, results, facts)


def simulate_target(arguments: argparse.Namespace) -> int:
    """Do the same on a queue."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    costs = COSTS[arguments.costs]
    rate = 1 / costs.seconds(1.0)
    times = arrival_times(arguments.shape, rate, arguments.seconds, arguments.seed)
    results = {
        policy: simulate(
            costs, times, target=arguments.target, floor=arguments.floor, retention=retention
        )
        for policy, retention in _policies(arguments)
    }
    return _report_target(arguments, results, {"simulated_costs": arguments.costs})


def _policies(arguments: argparse.Namespace) -> list[tuple[str, float | None]]:
    return [("1.0", 1.0), (f"floor {arguments.floor:g}", arguments.floor), ("auto", None)]


def _report_target(
    arguments: argparse.Namespace, results: dict[str, list[Outcome]], facts: dict[str, object]
) -> int:
    name = f"target-{arguments.shape}" + ("" if arguments.command == "target" else "-simulated")
    title = f"{arguments.shape}, target {arguments.target:g} s, floor {arguments.floor:g}"
    plot(results, arguments.target, title, arguments.folder / f"{name}.svg")
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.load", *arguments.words]),
        "target": arguments.target,
        **facts,
        **provenance(),
        "outcomes": {
            policy: [[one.arrived, one.ttft, one.retention] for one in outcomes]
            for policy, outcomes in results.items()
        },
    }
    (arguments.folder / f"{name}.json").write_text(json.dumps(record) + "\n")
    print(table(results, arguments.target))
    print(f"==> Plot: {arguments.folder / name}.svg")
    return 0


def _time(text: str) -> str:
    if not re.fullmatch(r"\d+[smh]?", text):
        raise argparse.ArgumentTypeError(f"a time is 30s, 5m or 1h, got {text!r}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser("run", help="send a load and write the report")
    load.add_argument("--host", help="default: start a server on the bundled model")
    load.add_argument("--users", type=int, default=4, help="default: %(default)s")
    load.add_argument("--time", type=_time, default="40s", help="at most; default: %(default)s")
    load.add_argument(
        "--conversations", type=int, default=240, help="at most; default: %(default)s"
    )
    load.add_argument("--retention", default="1.0,0.333,0.111", help="default: %(default)s")
    again = commands.add_parser("report", help="write the report of a run again")
    target = commands.add_parser("target", help="a load that the server holds a target under")
    target.add_argument("--host", help="default: start a server on the mid-size model")
    simulated = commands.add_parser("simulate", help="the same on a queue with costs of its own")
    simulated.add_argument("--costs", choices=sorted(COSTS), default="gpu")
    for command, seconds, goal in ((target, 180.0, 6.0), (simulated, 120.0, 1.0)):
        command.add_argument("--shape", choices=sorted(SHAPES), default="step")
        command.add_argument("--target", type=float, default=goal, help="default: %(default)s s")
        command.add_argument("--floor", type=float, default=0.111, help="default: %(default)s")
        command.add_argument(
            "--seconds", type=float, default=seconds, help="of each load; default: %(default)s"
        )
        command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    for command in (load, again, target, simulated):
        command.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    arguments.words = sys.argv[1:] if argv is None else argv
    try:
        commanded = {"run": run, "report": report, "target": hold_target}
        return commanded.get(arguments.command, simulate_target)(arguments)
    except (StartError, ServerError, OSError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: interrupted; the server was stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
