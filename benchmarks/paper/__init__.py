"""The tables of the paper, measured through lmms-eval against a running server."""
