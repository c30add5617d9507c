"""Turns tokens into text: the tokenizer, whole characters, stop words."""
