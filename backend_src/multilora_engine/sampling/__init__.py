"""Turns logits into tokens: biases, penalties, guides, the choice.

logits, token_history                      biases, penalties and bad words, by the tokens of each sequence
sampler                                    the choice of each sequence's next token
beam_ranking                               the likeliest continuations of beams
guided                                     guides: which tokens may come next
  guide_queue, guide_turns                 guides are compiled beside the steps, senders in turn
  guide_grammar                            their grammars, and the limits of these
  guide_sandbox, guide_sandbox_process     guides are tried in processes of their own before the engine compiles them
prompt_log_probs                           how likely the tokens of a prompt are
"""
