"""Cases: which questions about which scenes the benchmark asks, the same for every method."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from benchmarks.quality.fine import FINE, AnySplit, sample_fine
from benchmarks.quality.questions import FINE_KINDS, KINDS, Question, ask_one_of_each
from benchmarks.quality.scenes import Scene, sample_scene

SPLITS: tuple[AnySplit, ...] = ("test", "held_out")
HARD_SPLITS: tuple[AnySplit, ...] = ("crowded", "small", FINE)
UNPRUNED = Fraction(1)
RETENTIONS = (Fraction(1, 3), Fraction(2, 9), Fraction(1, 9), Fraction(1, 18))
# Far more than one run asks about, so that two seeds never share a scene.
_SCENES_PER_SEED = 100_000


@dataclass(frozen=True, slots=True)
class SceneId:
    """A scene of the benchmark: number `number` of one seed of one split."""

    split: AnySplit
    seed: int
    number: int

    def scene(self) -> Scene:
        index = self.seed * _SCENES_PER_SEED + self.number
        return sample_fine(index) if self.split == FINE else sample_scene(index, self.split)

    def questions(self) -> list[Question]:
        """Return up to one question of every kind."""
        kinds = FINE_KINDS if self.split == FINE else KINDS
        return ask_one_of_each(self.scene(), self.seed, kinds)


def scene_ids(splits: Iterable[AnySplit], num_seeds: int, num_scenes: int) -> list[SceneId]:
    """Return `num_scenes` scenes of each of `num_seeds` seeds of each split."""
    if not 0 < num_scenes <= _SCENES_PER_SEED:
        raise ValueError(f"scenes must be in 1..{_SCENES_PER_SEED}, got {num_scenes}")
    return [
        SceneId(split, seed, number)
        for split in splits
        for seed in range(num_seeds)
        for number in range(num_scenes)
    ]


def parse_retention(text: str) -> Fraction:
    """Return a retention written as a fraction (2/9) or a decimal number (0.222)."""
    try:
        retention = Fraction(text)
    except (ValueError, ZeroDivisionError):
        retention = Fraction(0)
    if not 0 < retention <= 1:
        raise ValueError(f"retention must be in (0, 1], got {text!r}; write 1/9 or 0.111")
    return retention
