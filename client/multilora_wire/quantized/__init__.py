"""Quantised checkpoints as their writers lay them out, read with NumPy alone, by engine and converter alike."""
