"""From tokens to text: the tokenizer, whole characters, stop words."""
