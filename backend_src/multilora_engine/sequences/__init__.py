"""Sequences: the engine's state of its requests, below the rooms that read it. engine/ decides, and writes most of it.

sequence             `Sequence`: the state of one request, its blocks of the KV cache, its held outputs
scheduled_sequence   `ScheduledSequence`: the part of a sequence that one step computes
token_history        the tokens of a sequence as penalties and bad words count them
prompt_log_probs     how likely the tokens of a prompt are
beam_search          several candidates for one answer
"""
