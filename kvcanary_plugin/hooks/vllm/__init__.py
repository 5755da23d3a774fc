"""vLLM: reserved entry point."""
