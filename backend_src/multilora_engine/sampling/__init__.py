"""Turns logits into tokens: biases, penalties, guides, the choice."""
