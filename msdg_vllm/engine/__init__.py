"""What every pruned model shares: the only package that knows vLLM's internals."""
