"""The whole method in one call, for those who need neither half of it apart."""

from collections.abc import Mapping

from torch import Tensor

from msdg_vllm.core.analysis import analyze_image
from msdg_vllm.core.budget import num_kept_tokens
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.selection import select_tokens


def prune_image(
    states: Mapping[int, Tensor],
    visual: Tensor,
    query: Tensor | None,
    profile: EncoderProfile,
    retention: float,
    patches_per_token: int = 1,
) -> Tensor:
    """Return which tokens of an image to keep for a question: exactly the budget, ascending.

    The rows a server keeps for the same image, question and retention, whatever runs the model.

    Args:
        states: The state entering each layer of `profile.layers`, `(.., N * patches_per_token, d)`;
            the keys of Hugging Face's `hidden_states`.
        visual: Projected tokens in the order of the prompt, `(.., N, D)`.
        query: Embeddings of the question's tokens, `(Q, D)`; None if there is no question.
        profile: The settings for the encoder.
        retention: The fraction to keep, in (0, 1].
        patches_per_token: How many encoder patches merge into one visual token.

    Returns:
        `(.., B)` int64, B being `num_kept_tokens(N, retention)`.
    """
    budget = num_kept_tokens(visual.shape[-2], retention)
    return select_tokens(analyze_image(states, profile, patches_per_token), visual, query, budget)
