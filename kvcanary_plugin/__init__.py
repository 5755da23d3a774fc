"""kvcanary_plugin: runtime integrity checks for the KV cache of an inference engine."""

__version__ = "0.1.0"
