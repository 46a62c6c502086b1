"""The ablations of the paper as options; the defaults are the paper's method."""

from dataclasses import dataclass
from typing import Literal, get_args

from msdg_vllm.core.errors import OptionError
from msdg_vllm.core.profiles import EncoderProfile

Grouping = Literal["profile", "direction", "output", "none"]
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
        grouping: Group as the profile says, by update direction (Eq. 1), by the encoder's output
            features, or not at all: one group, so that ranking is global.
        saliency: u as displacement between the ends of the window, as update magnitude
            accumulated over its layers, or as a vector given to `analyze_image`. The first two
            are constant where the profile has no window.
        sink_filter: False keeps sink tokens as candidates.
        budgets: Share the budget by softmax of group means (Eq. 4) or by group size.
        allocate_by: The signal whose group means share the budget (with `budgets="softmax"`).
        rank_by: The signal that ranks tokens inside a group; `"random"` draws from `random_seed`.
        random_seed: Seed of `rank_by="random"`; no effect otherwise.
    """

    grouping: Grouping = "profile"
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
        grouping = self.grouping_of(profile)
        if grouping == "direction":
            needed |= set(profile.direction_layers)
        elif grouping == "output":
            needed.add(profile.features_layer)
        if self.saliency != "given" and profile.saliency_window is not None:
            start, end = profile.saliency_window
            needed |= {start, end} if self.saliency == "endpoint" else set(range(start, end + 1))
        if self.sink_filter and profile.sink_state is not None:
            needed.add(profile.sink_state)
        if not needed and self.saliency != "given":
            needed.add(profile.features_layer)  # it tells how many tokens there are
        return tuple(sorted(needed))

    def grouping_of(self, profile: EncoderProfile) -> Grouping:
        """Return what these options group the tokens of an encoder by."""
        return profile.grouping if self.grouping == "profile" else self.grouping


PAPER = SelectionOptions()
