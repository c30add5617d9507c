"""The sample adapters of adapters/: how they were trained, and what they do."""
