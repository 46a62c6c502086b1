"""How results came about that nobody measured."""

from fractions import Fraction

NINTH = Fraction(1, 9)
FACTS = {
    "command": "python -m benchmarks.quality run",
    "commit": "0123456789abcdef",
    "date": "2026-01-01",
    "processor": "a processor",
    "versions": {"torch": "2"},
    "model": {"name": "a-model", "weights_sha256": "f" * 64},
    "scenes": {"splits": ["test"], "seeds": 1, "per_seed": 10},
}
