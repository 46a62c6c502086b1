"""Faults on purpose: what a real server survives, and what it costs; see docs/reliability.md."""
