"""The Triton side: what the Python models of `model_repository` are, and how tensors become requests and answers.

launch                             `multilora-serve`
triton_model                       generation, generation_unary: wiring of
  front, calls, replies, outputs   a request accepted, what it asks for, when to answer, with which tensors
preprocessing, postprocessing      the outer steps of the ensembles, both an
  immediate_model                  a model that answers at once
inputs, prompts                    checked input tensors, prompts as token ids
engine_link, triton_api            the engine as a front sees it, Triton's Python interface as we use it
"""
