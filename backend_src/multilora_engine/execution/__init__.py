"""One step on the device: its inputs, the forward pass, CUDA graphs, transfers."""
