"""SGLang loads one package of models: this one then has to bring the sliding-window model too."""

from kvcanary_plugin.drill.models.sglang_swa.tiny_swa import EntryClass

__all__ = ["EntryClass"]
