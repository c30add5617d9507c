"""The sample adapters of adapters/: how they were trained, and how well they keep their promises."""
