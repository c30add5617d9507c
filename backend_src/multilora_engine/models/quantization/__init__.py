"""Weights of quantised checkpoints: their codes go into `QuantizedWeight`s as they are read, and stay codes."""
