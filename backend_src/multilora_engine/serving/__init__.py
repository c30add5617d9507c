"""The Triton side: the Python models of `model_repository`, and how tensors become requests and answers.

triton_model                               generation, generation_unary: the wiring of
  generation_front, front                  a request accepted
  request_parser, calls, *_inputs          the call that its tensors ask for, checked
  senders, call_limits, uploads            the rights and limits of its sender
  replies, outputs                         when to answer, with which tensors
preprocessing, postprocessing              the outer steps of the ensembles, both an
  immediate_model                          a model that answers at once
adapters_model                             operators' questions about adapters
inputs, prompts, token_lists               checked input tensors, prompts as token ids, words and biases
engine_link, triton_api                    the engine as a front sees it, Triton's Python interface and its error codes
metrics, load_seconds                      the engine's counts on the server's metrics port
"""
