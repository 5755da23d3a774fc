"""Engine hooks: each sub-package imports one engine and translates for it; nothing else does."""
