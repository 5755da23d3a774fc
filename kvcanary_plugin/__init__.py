"""An online integrity canary for the KV cache of LLM serving engines."""

__version__ = "0.1.0"
