"""vLLM's OpenAI-compatible server with a retention per request: HTTP only."""
