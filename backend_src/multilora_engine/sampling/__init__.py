"""From logits to tokens: biases, penalties, guides, the choice."""
