"""The Triton side: the Python models of `model_repository`, and how tensors become requests and answers.

triton_model                               generation, generation_unary: the wiring of
  generation_front, front                  a request accepted; the engine as a model sees it
  llmapi, vllm                             doors of other protocols, whose requests become those of generation
  request_parser                           the call that its tensors ask for, checked; how tokens are chosen
  structured_outputs                       guides as vLLM and Dynamo write them
  unsupported                              inputs that this server has no use for
  senders                                  the rights of its sender
  sent_adapter, uploads                    an adapter that comes with it; amounts that are under way
  ordered_jobs                             long jobs, in order
  replies, outputs                         when to answer, with which tensors
immediate_model                            preprocessing, postprocessing: models that answer at once
adapters_model                             operators' questions about adapters
inputs, token_lists                        checked input tensors; prompts, words and biases as token ids
triton_api                                 Triton's Python interface and its error codes
metrics                                    the engine's counts on the server's metrics port
"""
