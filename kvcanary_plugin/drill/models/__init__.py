"""Model configurations for the drill server: a few layers, random weights, no tokenizer.

Each ``tiny-*`` directory is a model path an engine can load with dummy weights.
"""
