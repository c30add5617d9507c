"""Turns logits into tokens: biases, penalties, guides, the choice.

logits         biases, penalties, bad words and guides, by the tokens of each sequence
token_counts   how often a sequence has each token, on the device
sampler        the choice of each sequence's next token
beam_ranking   the likeliest continuations of beams
"""
