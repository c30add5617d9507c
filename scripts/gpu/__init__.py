"""The report of a GPU: are our kernels right on it, and how far are they from its limits."""
