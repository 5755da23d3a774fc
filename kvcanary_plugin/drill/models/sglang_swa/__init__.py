"""What tiny-swa needs inside SGLang, which imports this through SGLANG_EXTERNAL_MODEL_PACKAGE."""
