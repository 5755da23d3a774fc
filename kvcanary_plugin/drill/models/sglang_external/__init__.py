"""Model classes that SGLang loads by name, through ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""
