"""Answers as OpenAI and vLLM shape them: whole, or as server-sent events that add up to the same."""
