"""What follows from a run beside stock vLLM, on measurements made up to have known answers."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import RETENTIONS, main, make_parser
from benchmarks.serving.page import goals_table, plot, section, summary
from benchmarks.serving.rounds import case_order
from benchmarks.serving.samples import PRUNING, STOCK, TEXT, Burst, Results, Sample
from benchmarks.shared.provenance import provenance

ENCODER, PER_TOKEN, SELECTION = 0.2, 0.002, 0.002
TOKENS = {1.0: 600, 0.333: 216, 0.222: 152, 0.111: 88, 0.056: 56}
SOURCE = {
    "command": "python -m benchmarks.serving run",
    **provenance(),
    "model": "a model",
    "server_options": ["--dtype=bfloat16"],
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "2"},
    "max_tokens": 8,
    "concurrency": 8,
}


def made_up(overhead: float = 0.01, num_rounds: int = 4) -> Results:
    """A run on a machine that is slower in every round, and slows all cases alike."""
    results = Results(SOURCE, [], [])
    for number in range(1, num_rounds + 1):
        for retention, tokens in TOKENS.items():
            add(results, number, TEXT, retention, PER_TOKEN * tokens)
            add(results, number, PRUNING, retention, ENCODER + PER_TOKEN * tokens + overhead)
        add(results, number, STOCK, 1.0, ENCODER + PER_TOKEN * 600)
    return results


def add(results: Results, number: int, case: str, retention: float, ttft: float) -> None:
    slow = 1 + number / 10
    sample = Sample(
        round=number,
        case=case,
        retention=retention,
        ttft=ttft * slow,
        latency=2 * ttft * slow,
        prompt_tokens=TOKENS[retention],
        encoder=0.0 if case == TEXT else ENCODER * slow,
        selection=SELECTION * slow if case == PRUNING and retention < 1 else 0.0,
    )
    results.samples.append(sample)
    if case != TEXT:
        tokens = 16 * TOKENS[retention]
        results.bursts.append(Burst(number, case, retention, 16, 16 * sample.ttft, tokens))


def test_ratios_are_taken_within_a_round() -> None:
    results = made_up(overhead=0.014)
    cost = results.against_stock(lambda sample: sample.ttft, 1.0)
    assert (cost.low, cost.median, cost.high) == pytest.approx((1.01, 1.01, 1.01))
    assert results.throughput_against_stock(1.0).median == pytest.approx(1 / 1.01)


def test_the_limit_is_stock_vllms_encoder_and_prefill() -> None:
    results = made_up(overhead=0.0376)
    assert results.limits(0.111)[0] == pytest.approx(1.1 * (ENCODER + PER_TOKEN * 88))
    assert results.against_limit(0.111).median == pytest.approx(1.1)


def test_selection_is_compared_with_stock_vllms_encoder() -> None:
    assert made_up().selection_share(0.111).median == pytest.approx(SELECTION / ENCODER)


def test_a_good_run_meets_all_goals() -> None:
    assert [goal.is_met for goal in made_up().goals()] == [True] * 5


def test_a_slow_server_misses_the_goals_about_cost() -> None:
    goals = made_up(overhead=0.1).goals()
    assert [goal.is_met for goal in goals] == [False, False, True, True, True]
    assert "+7.1%" in goals[0].measured


def test_a_retention_that_is_not_faster_misses_the_goal() -> None:
    results = made_up()
    slow = [
        replace(s, ttft=9.0) if (s.case, s.retention) == (PRUNING, 0.056) else s
        for s in results.samples
    ]
    missed = [goal.text for goal in replace(results, samples=slow).goals() if not goal.is_met]
    assert missed == ["TTFT falls with every step of retention"]


def test_a_slow_selection_misses_the_goal() -> None:
    results = made_up()
    slow = [replace(sample, selection=5 * sample.selection) for sample in results.samples]
    missed = [goal.text for goal in replace(results, samples=slow).goals() if not goal.is_met]
    assert missed == ["analysis and selection take at most 2% of the encoder's time"]


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = made_up()
    results.save(tmp_path / "serving.json")
    assert Results.load(tmp_path / "serving.json") == results


def test_every_retention_has_a_line_in_each_table() -> None:
    first, second = summary(made_up()).split("\n\n")
    assert len(first.splitlines()) == 2 + 1 + len(RETENTIONS)
    assert len(second.splitlines()) == 2 + len(RETENTIONS)
    assert "| retention 0.111 | 88 |" in first
    assert "| 0.111 | 0.15 |" in second


def test_the_section_names_command_machine_and_commit() -> None:
    text = section(made_up())
    assert SOURCE["command"] in text
    assert SOURCE["machine"]["processor"] in text
    assert f"commit {SOURCE['commit']}" in text
    assert "`VLLM_CPU_KVCACHE_SPACE=2 --dtype=bfloat16`" in text
    assert goals_table(made_up()) in text


def test_the_same_numbers_give_the_same_plot(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot(made_up(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_retention_1_is_always_measured_and_what_follows_dashes_goes_to_the_servers() -> None:
    arguments = make_parser().parse_args(
        ["run", "--retention", "0.5,0.25", "--", "--gpu-memory-utilization", "0.45"]
    )
    assert arguments.retention == [1.0, 0.5, 0.25]
    assert arguments.server_options == ["--gpu-memory-utilization", "0.45"]


@pytest.mark.parametrize("number", range(6))
def test_a_round_has_every_case_once_with_stock_and_retention_1_as_neighbours(number: int) -> None:
    texts = [(TEXT, retention) for retention in RETENTIONS]
    order = case_order(number, RETENTIONS, texts)
    assert sorted(order) == sorted([(STOCK, 1.0), *((PRUNING, r) for r in RETENTIONS), *texts])
    assert abs(order.index((STOCK, 1.0)) - order.index((PRUNING, 1.0))) == 1
    servers = [case == PRUNING for case, _ in order]
    changes = sum(one != other for one, other in pairwise(servers))
    assert changes == 1, "a change of server costs a pause"
    assert servers[0] is (number % 2 == 0)


def test_rendering_without_results_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", "--results", str(tmp_path / "none.json")]) == 1
    assert "measure first: python -m benchmarks.serving run" in capsys.readouterr().err
