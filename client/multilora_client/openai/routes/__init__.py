"""The paths that are served, a module for each group. They declare inputs and outputs; the work is done elsewhere."""
