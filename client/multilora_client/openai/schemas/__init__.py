"""Requests as OpenAI and vLLM define them.

Every field is honoured, changes no answer, or is refused by its name. A null is as good as not given. Unknown fields
are refused, so that a parameter of tomorrow is not ignored today.
"""
