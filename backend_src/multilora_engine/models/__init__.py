"""Model definitions: plain functions of their weights and a `ForwardBatch`."""
