"""MSDG-Prune, the method alone: which visual tokens of an image to keep for a question.

Li et al., "Representation Dynamics Reveal Semantic Saliency and Similarity for Visual Token
Pruning in MLLMs". Torch and the standard library only; knows nothing of vLLM.

    budget  = num_kept_tokens(num_tokens, retention)
    signals = analyze_image(states, profile)                  # once per image
    keep    = select_tokens(signals, visual, query, budget)   # once per question

or all of it at once, `keep = prune_image(states, visual, query, profile, retention)`.

Shapes, the same letters everywhere:

    N   visual tokens of an image before pruning
    d   width of the vision encoder's states
    D   width of the projected tokens and of the language model's embeddings
    Q   tokens of the query
    K   groups
    M   candidates: valid tokens that are no sinks
    B   budget, the number of tokens to keep
    R   rows: images or tiles of equal size that travel together (the leading dimensions)

No function here waits for the device: shapes follow from Python integers, and what the data
decides (sinks, convergence, budgets of groups) stays on the device as masks and counts.
"""

from msdg_vllm.core.analysis import ImageSignals, analyze_image
from msdg_vllm.core.budget import num_kept_tokens, validate_retention
from msdg_vllm.core.options import SelectionOptions
from msdg_vllm.core.pruning import prune_image
from msdg_vllm.core.selection import TokenScores, score_tokens, select_tokens, take_tokens

__all__ = [
    "ImageSignals",
    "SelectionOptions",
    "TokenScores",
    "analyze_image",
    "num_kept_tokens",
    "prune_image",
    "score_tokens",
    "select_tokens",
    "take_tokens",
    "validate_retention",
]
