"""Tools: how calls of functions are asked for, guided, and read from what a model writes."""
