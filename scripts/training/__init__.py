"""Trains the sample adapters of adapters/, and measures how well they keep their promises."""
