"""The paths that are served, a module for each group. They declare inputs and outputs; the work is done elsewhere.

generation                                 /v1/chat/completions, /v1/completions, /v1/responses
models, adapters, tokenization             /v1/models; vLLM's paths for adapters and for the tokenizer
service                                    health, version and metrics
absent, reading                            paths that are not served; GET with HEAD
"""
