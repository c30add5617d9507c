"""Sequences: the engine's state of its requests. This room lies below its readers. engine/ writes most of the state.

sequence             `Sequence`: the state of one request, its blocks of the KV cache, its part of a step
token_history        counts the tokens of a sequence for penalties and bad words
prompt_log_probs     the log-probs of the tokens of a prompt
beam_search          the rules of a beam search
"""
