"""The ablations of the paper as options; the defaults are the paper's method."""

from dataclasses import dataclass
from typing import Literal, get_args

from msdg_vllm.core.errors import OptionError
from msdg_vllm.core.profiles import EncoderProfile

Grouping = Literal["direction", "output", "none"]
Saliency = Literal["endpoint", "accumulated", "given"]
Budgets = Literal["softmax", "size"]
Signal = Literal["score", "relevance", "saliency"]
Ranking = Literal["score", "relevance", "saliency", "random"]


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """What the ablation tables compare, one field per column; the default is the paper's method.

    The first three fields belong to `analyze_image`, the others to `select_tokens`; one value
    can be handed to both.

    Attributes:
        grouping: Group by update direction (Eq. 1), by the encoder's output features, or not at
            all: one group, so that ranking is global.
        saliency: u as displacement between the ends of the window, as update magnitude
            accumulated over its layers, or as a vector given to `analyze_image`.
        sink_filter: False keeps sink tokens as candidates.
        budgets: Share the budget by softmax of group means (Eq. 4) or by group size.
        allocate_by: The signal whose group means share the budget (with `budgets="softmax"`).
        rank_by: The signal that ranks tokens inside a group; `"random"` draws from `random_seed`.
        random_seed: Seed of `rank_by="random"`; no effect otherwise.
    """

    grouping: Grouping = "direction"
    saliency: Saliency = "endpoint"
    sink_filter: bool = True
    budgets: Budgets = "softmax"
    allocate_by: Signal = "score"
    rank_by: Ranking = "score"
    random_seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("grouping", get_args(Grouping)),
            ("saliency", get_args(Saliency)),
            ("sink_filter", (True, False)),
            ("budgets", get_args(Budgets)),
            ("allocate_by", get_args(Signal)),
            ("rank_by", get_args(Ranking)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"{name} must be one of {list(allowed)}, got {value!r}")

    def layers(self, profile: EncoderProfile) -> tuple[int, ...]:
        """Return the sorted layers whose input states `analyze_image` needs with these options.

        With the default options this is `profile.layers`.
        """
        needed: set[int] = set()
        if self.grouping == "direction":
            needed |= set(profile.direction_layers)
        elif self.grouping == "output":
            needed.add(profile.features_layer)
        start, end = profile.saliency_window
        if self.saliency == "endpoint":
            needed |= {start, end}
        elif self.saliency == "accumulated":
            needed |= set(range(start, end + 1))
        if self.sink_filter:
            needed.add(profile.sink_layer + 1)
        return tuple(sorted(needed))


PAPER = SelectionOptions()
