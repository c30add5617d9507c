"""Turns logits into tokens: applies biases, penalties and guides, then chooses.

logits         applies biases, penalties, bad words and guides
token_counts   counts each sequence's tokens on the device
sampler        chooses each sequence's next token, and the likeliest continuations of beams
"""
