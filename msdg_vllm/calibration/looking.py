"""The first look: what one image says about every layer and every window, in a few kilobytes."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msdg_vllm.calibration.foreground import auc, border_distance, foreground_cut, rank_correlation
from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.calibration.tower import Encoded

TOP_SHARE = 0.3  # of tokens, by update magnitude, as in the paper
NUM_TOP_TOKENS = 10  # whose activations are examined, as in the paper
# A token is concentrated when the entropy of its move is below this part of the usual.
LOW_ENTROPY = 0.75
_SINK_SHARE = 0.3  # a token with more of its energy in one coordinate does not count as another
_TINY = 1e-12
Floats = NDArray[np.float64]
Record = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Moves:
    """How far tokens move, valid ones only.

    Attributes:
        layers: v, over each layer, `(L, n)`.
        windows: u, over each window of the width asked for, `(S, n)`.
    """

    layers: Tensor
    windows: Tensor


def moves_of(encoded: Encoded, width: int, patches_per_token: int) -> Moves:
    """Measure every update and every window; patches of a token are averaged, as u is."""
    states = [state.float() for state in encoded.states]
    valid = torch.from_numpy(encoded.valid).to(states[0].device)

    def moved(first: int, last: int) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(states[last] - states[first], dim=-1)
        return norms.view(-1, patches_per_token).mean(dim=-1)[valid]

    last = len(states) - 1
    return Moves(
        layers=torch.stack([moved(n, n + 1) for n in range(last)]),
        windows=torch.stack([moved(n, n + width) for n in range(last - width + 1)]),
    )


def look(
    encoded: Encoded,
    width: int,
    patches_per_token: int,
    annotation: Annotation | None = None,
    flipped: Encoded | None = None,
) -> Record:
    """Return the statistics of one image; `S` windows, `L` layers.

    Args:
        encoded: The image after the tower.
        width: Updates in a window.
        patches_per_token: How many patches merge into a token.
        annotation: What is where, if masks were given.
        flipped: The image's mirror image after the tower, if it was encoded too.
    """
    moves = moves_of(encoded, width, patches_per_token)
    valid = encoded.valid
    layers, windows = moves.layers.cpu().numpy(), moves.windows.cpu().numpy()
    output = encoded.states[-1].float().unflatten(0, (-1, patches_per_token))
    features = output.mean(dim=1).cpu().numpy()  # (N, d)
    cut = foreground_cut(features, encoded.grid, valid)
    border = border_distance(features, encoded.grid, valid)
    record: Record = {
        "ratio": layers.max(axis=1) / np.maximum(np.median(layers, axis=1), _TINY),
        "update_mean": layers.mean(axis=1),
        "window_mean": windows.mean(axis=1),
        "layer_cut": np.array([auc(v, cut) for v in layers]),
        "cut": np.array([auc(u, cut) for u in windows]),
        "border": np.array([rank_correlation(u, border) for u in windows]),
        **_top_tokens(encoded, patches_per_token),
        **_position_sums(windows, encoded.grid, valid),
    }
    if flipped is not None and flipped.grid == encoded.grid:
        rows, columns = encoded.grid
        mirrored = np.arange(rows * columns).reshape(rows, columns)[:, ::-1].reshape(-1)
        mirrored_valid = flipped.valid[mirrored]
        if (mirrored_valid == valid).all():
            back = np.cumsum(flipped.valid) - 1
            other = moves_of(flipped, width, patches_per_token).windows.cpu().numpy()
            other = other[:, back[mirrored[valid]]]
            pairs = zip(windows, other, strict=True)
            record["flip"] = np.array([rank_correlation(u, w) for u, w in pairs])
    if annotation is not None:
        areas = annotation.instances[:, valid]
        record["layer_recall"] = np.array([recall(v, areas) for v in layers])
        record["recall"] = np.array([recall(u, areas) for u in windows])
        centre = centre_prior(encoded.grid)[valid]
        record["centre_recall"] = np.array(recall(centre, areas))
        share = round(TOP_SHARE * int(valid.sum())) / max(int(valid.sum()), 1)
        record["chance_recall"] = np.array(share)
    return record


def recall(scores: NDArray[Any], areas: NDArray[Any]) -> float:
    """Return the share of each instance's area under the top 30 % of tokens, as a mean of `(I,)`.

    The paper's foreground recall. NaN without an instance.
    """
    total = areas.sum(axis=1)
    if not (total > 0).any():
        return float("nan")
    areas, total = areas[total > 0], total[total > 0]
    num_top = max(1, round(TOP_SHARE * len(scores)))
    top = np.argsort(-scores, kind="stable")[:num_top]
    return float((areas[:, top].sum(axis=1) / total).mean())


def centre_prior(grid: tuple[int, int]) -> Floats:
    """Return a score that is highest in the middle of the image, `(N,)`."""
    rows, columns = (np.linspace(-1, 1, size) for size in grid)
    return -(rows[:, None] ** 2 + columns[None] ** 2).reshape(-1)


def _top_tokens(encoded: Encoded, patches_per_token: int) -> Record:
    """Examine the ten patches that each layer moves farthest, `(L, 10)` each.

    The coordinate in which most of their move lies, the entropy of the move, and the absolute
    value at that coordinate afterwards. Moves and states count as deviations from the image's
    mean: a coordinate that is large in every token tells none of them apart.
    """
    valid = torch.from_numpy(np.repeat(encoded.valid, patches_per_token))
    rows: dict[str, list[NDArray[Any]]] = defaultdict(list)
    valid = valid.to(encoded.states[0].device)
    for before, after in pairwise(encoded.states):
        state = after.float()[valid]
        moves = state - before.float()[valid]
        order = torch.linalg.vector_norm(moves, dim=-1).argsort(descending=True, stable=True)
        num_top = min(NUM_TOP_TOKENS, len(order))
        top, middle = order[:num_top], order[len(order) // 2 :][:num_top]
        deviations, energy = _deviations(moves)
        entropies = _entropy(deviations[top], energy[top])
        usual = _entropy(deviations[middle], energy[middle]).mean()
        coordinates = deviations[top].abs().argmax(dim=-1)
        values = state[top].gather(1, coordinates.unsqueeze(-1)).squeeze(-1).abs()
        # What tokens that are not concentrated show at the coordinate of the one that is most.
        coordinate = coordinates[entropies.argmin()]
        state_deviations, state_energy = _deviations(state)
        is_sink = deviations[:, coordinate].square() > _SINK_SHARE * energy
        is_sink |= state_deviations[:, coordinate].square() > _SINK_SHARE * state_energy
        rest = state[:, coordinate].abs().masked_fill(is_sink, 0.0).amax()
        for name, value in (
            ("top_coordinate", _padded(coordinates, -1)),
            ("top_entropy", _padded(entropies, 1.0)),
            ("top_value", _padded(values, 0.0)),
            ("usual_entropy", usual.cpu().numpy()),
            ("rest_value", rest.cpu().numpy()),
            ("rest_coordinate", coordinate.cpu().numpy()),
        ):
            rows[name].append(value)
    return {name: np.stack(parts) for name, parts in rows.items()}


def _padded(values: Tensor, fill: float) -> NDArray[Any]:
    array: NDArray[Any] = values.cpu().numpy()
    return np.pad(array, (0, NUM_TOP_TOKENS - len(array)), constant_values=fill)


def _deviations(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row less the mean row, `(P, d)`, and its energy, `(P,)`."""
    deviations = values - values.mean(dim=0)
    return deviations, deviations.square().sum(dim=-1).clamp_min(_TINY)


def _entropy(deviations: Tensor, energy: Tensor) -> Tensor:
    """Entropy of the energy of each row over coordinates, 1 for an even spread."""
    shares = deviations.square() / energy.unsqueeze(-1)
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1) / np.log(max(shares.shape[-1], 2))
    return entropy


def _position_sums(
    windows: NDArray[Any], grid: tuple[int, int], valid: NDArray[np.bool_]
) -> Record:
    """Sums from which follows how much of u, standardised per image, position explains."""
    rows, columns = (np.linspace(-1, 1, size) if size > 1 else np.zeros(1) for size in grid)
    y, x = (axis.reshape(-1)[valid] for axis in np.meshgrid(rows, columns, indexing="ij"))
    terms = np.stack([x, y, x * x, y * y, x * y, x**4, y**4, x * x * y * y], axis=1)
    terms = terms - terms.mean(axis=0)
    spread = windows.std(axis=1, keepdims=True)
    standard = (windows - windows.mean(axis=1, keepdims=True)) / np.maximum(spread, _TINY)
    return {
        "position_terms": terms.T @ terms,
        "position_moves": standard @ terms,
        "position_total": (standard**2).sum(axis=1),
    }
