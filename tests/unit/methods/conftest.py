"""Threads in the tests of the methods."""

from tests.unit.threads import _single_thread

__all__ = ["_single_thread"]
