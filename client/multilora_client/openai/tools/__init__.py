"""Tools: how calls of functions are asked for, guided, and read from a model's text."""
