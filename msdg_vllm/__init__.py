"""Visual token pruning for vLLM: every request chooses how much of its images to keep.

Importing this package is cheap and free of side effects; vLLM calls `register()` through the
`vllm.general_plugins` entry point in every process it starts.
"""

__version__ = "0.1.0"


def register() -> None:
    """Put the pruned models in vLLM's registry; calling it again changes nothing."""
