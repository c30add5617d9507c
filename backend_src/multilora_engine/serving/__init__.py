"""The Triton side: the Python models of `model_repository`, and how tensors become requests and answers.

triton_model                               generation, generation_unary: the wiring of
  generation_front, front                  a request accepted
  request_parser                           the call that its tensors ask for, checked
  sampling_inputs, unsupported             how tokens are chosen; inputs that this server has no use for
  senders, call_limits                     the rights and limits of its sender
  sent_adapter, uploads                    an adapter that comes with it; amounts that are under way
  ordered_jobs                             long jobs, in order
  replies, outputs                         when to answer, with which tensors
  prompt_answer                            the part of an answer that tells of the prompt
preprocessing, postprocessing              text to tokens for the ensembles, tokens to text; both an
  immediate_model                          a model that answers at once
adapters_model                             operators' questions about adapters
inputs, prompts, token_lists               checked input tensors, prompts as token ids, words and biases
engine_link, triton_api                    the engine as a front sees it, Triton's Python interface and its error codes
metrics, load_seconds                      the engine's counts on the server's metrics port
"""
