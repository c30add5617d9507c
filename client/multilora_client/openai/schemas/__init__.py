"""Requests as OpenAI and vLLM define them.

Every field is honoured, changes no answer, or is refused by its name. A null is as good as not given. Unknown fields
are refused, so that a parameter of tomorrow is not ignored today.

base                                       the base of all requests
sampling, guides, tools                    fields that requests share: choice of tokens, form of answers, functions
chat, completion                           /v1/chat/completions, /v1/completions
responses, response_items                  /v1/responses, and the items of its conversations
tokenization, adapters                     vLLM's paths for the tokenizer and for adapters
"""
