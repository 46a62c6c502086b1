"""Engines in these tests offer every method, as an operator's `--methods all` does."""

import os

os.environ.setdefault("MSDG_METHODS", "all")
