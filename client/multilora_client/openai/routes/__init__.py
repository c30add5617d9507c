"""What is served, a module for each group of paths. They say what goes in and out; the work is done elsewhere."""
