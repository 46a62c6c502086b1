"""What pruning buys: this server beside stock vLLM."""
