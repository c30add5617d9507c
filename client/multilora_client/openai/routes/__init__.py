"""The paths that are served, a module for each group. They say what goes in and out; the work is done elsewhere."""
