"""What the vision encoder does in one step: charged by what it computes, and shared.

Fills a gap: vLLM's scheduler charges an image with the tokens that the prompt holds of it. That
is what the encoder computes only while nothing is pruned; at a low retention one request could
bring hundreds of images into one step, and everybody would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from weakref import WeakKeyDictionary

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from msdg_vllm.engine.hooks import wrap
from msdg_vllm.engine.spec import PruningSpec, row_of

Scheduled = tuple[list[int], int, int, list[int], list[int]]
"""Items to encode, tokens to compute, what is left of the encoder's step, and two more lists."""

_MAX_NEWCOMERS = 8


def install() -> None:
    """Put the real cost of pruned items into vLLM's scheduler; again changes nothing."""
    wrap(Scheduler, "_try_schedule_encoder_inputs", _schedule_encoder_inputs)


class _Turns:
    """Who asked for the encoder and got it or not: in the last step, and so far in this one."""

    def __init__(self) -> None:
        self.step = -1
        self.served: set[str] = set()
        self.passed_over: dict[str, int] = {}
        self.given: set[str] = set()
        self.denied: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """Start a step unless it has begun; only the step before counts."""
        if step != self.step:
            is_next = step == self.step + 1
            self.served = self.given if is_next else set()
            self.passed_over = self.denied if is_next else {}
            self.given, self.denied = set(), {}
            self.step = step


_TURNS: WeakKeyDictionary[Scheduler, _Turns] = WeakKeyDictionary()


def _schedule_encoder_inputs(
    stock: Callable[..., Scheduled],
    self: Scheduler,
    request: Request,
    num_computed_tokens: int,
    num_new_tokens: int,
    encoder_compute_budget: int,
    shift_computed_tokens: int = 0,
) -> Scheduled:
    start = num_computed_tokens + shift_computed_tokens
    costs, pruned = _costs(self, request, num_computed_tokens, start + num_new_tokens)
    budget = encoder_compute_budget
    turns = _TURNS.setdefault(self, _Turns())
    turns.begin(self.current_step)
    if pruned:
        allowance = _allowance(turns, self, request, costs, budget)
        for index, cost in costs.items():
            allowance -= cost
            if allowance < 0:
                # As vLLM does it: up to the image that has to wait.
                offset = request.mm_features[index].mm_position.offset
                num_new_tokens = max(0, offset - start)
                break
    if pruned and num_new_tokens == 0:
        scheduled: Scheduled = [], 0, budget, [], []
    else:
        scheduled = stock(
            self, request, num_computed_tokens, num_new_tokens, budget, shift_computed_tokens
        )
    items, num_new_tokens, left, *rest = scheduled
    if items:
        turns.given.add(request.request_id)
    elif costs:
        turns.denied[request.request_id] = next(iter(costs.values()))
    if pruned:
        left = budget - sum(costs[index] for index in items)
    return items, num_new_tokens, left, rest[0], rest[1]


def _costs(
    scheduler: Scheduler, request: Request, start: int, end: int
) -> tuple[dict[int, int], bool]:
    """Tokens the encoder computes for each item of a window that it has to run on, in order.

    Also says whether any of them is pruned.
    """
    costs: dict[int, int] = {}
    pruned = False
    if end <= start or not request.has_encoder_inputs or scheduler.is_encoder_decoder:
        return costs, pruned
    seen = set()
    total, limit = 0, scheduler.max_num_encoder_input_tokens
    cache = scheduler.encoder_cache_manager
    for index in range(*get_mm_features_in_window(request.mm_features, start=start, end=end)):
        feature = request.mm_features[index]
        if (
            feature.identifier in seen
            or cache.get_cached_num_encoder_embeds(request, index) is not None
            or not _has_embeds(feature.mm_position, start, end)
        ):
            continue
        seen.add(feature.identifier)
        num_tokens = _num_tokens_before_pruning(feature)
        pruned = pruned or num_tokens is not None
        cost = feature.mm_position.get_num_embeds() if num_tokens is None else num_tokens
        # An item that no step could ever pay for would wait for ever.
        costs[index] = min(cost, limit)
        total += costs[index]
        if total > limit:
            break  # no step gets further than this
    return costs, pruned


def _has_embeds(position: PlaceholderRange, start: int, end: int) -> bool:
    """Whether a window has more of an item than the text around its tokens.

    vLLM does not encode an item for its text; one that was charged all the same would keep the
    next item waiting for ever, if a step can pay for one of them only.
    """
    first, last = position.get_embeds_indices_in_range(
        max(0, start - position.offset), min(position.length, end - position.offset)
    )
    return bool(last > first)


def _num_tokens_before_pruning(feature: MultiModalFeatureSpec) -> int | None:
    """What the encoder computes for a pruned item; None for an item that is not pruned."""
    if (row := row_of(feature)) is None:
        return None
    budget, num_tokens = PruningSpec.counts_in(row)
    return num_tokens if budget else None


def _allowance(
    turns: _Turns, scheduler: Scheduler, request: Request, costs: dict[int, int], budget: int
) -> int:
    """How much of a step's budget a request may take, so that others get a turn.

    Without this a request with hundreds of images would take all of every step, as the first
    of the running ones, until its last image. It leaves a step to those who got nothing in the
    last one, and to those who have just come.
    """
    own = request.request_id
    others = sum(
        cost
        for request_id, cost in turns.passed_over.items()
        if request_id != own and request_id in scheduler.requests
    )
    if own in turns.passed_over:
        return min(budget, max(budget - others, next(iter(costs.values()))))
    if sum(costs.values()) <= budget // 2:
        return budget - others
    newcomers = islice(scheduler.waiting, _MAX_NEWCOMERS) if own in turns.served else ()
    return 0 if others or any(new.has_encoder_inputs for new in newcomers) else budget
