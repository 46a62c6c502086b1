"""What methods cost, as a table."""

from benchmarks.serving.costs import UNPRUNED, table


def sample(encoder: float, selection: float, ttft: float, visual_tokens: float) -> dict[str, float]:
    return {
        "encoder": encoder,
        "selection": selection,
        "ttft": ttft,
        "visual_tokens": visual_tokens,
    }


def test_the_fastest_comes_first_and_medians_are_of_the_rounds() -> None:
    samples = {
        UNPRUNED: [sample(0.4, 0.0, 2.0, 576)] * 3,
        "msdg": [sample(0.4, 0.02, ttft, 64) for ttft in (9.0, 1.0, 1.0)],
        "resize": [sample(0.05, 0.0, 0.5, 64)] * 3,
    }
    lines = table({"samples": samples}).splitlines()
    assert lines[2] == "| resize | 64 | 50.0 ms | 0.0 ms | 500.0 ms | 25% |"
    assert lines[3] == "| msdg | 64 | 400.0 ms | 20.0 ms | 1000.0 ms | 50% |"
    assert lines[4].startswith("| unpruned | 576 |")
