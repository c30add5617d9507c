"""One base model, thousands of LoRA adapters: the engine and its Triton Inference Server front.

Rooms, from top to bottom; each imports only rooms below it, and its `__init__.py` says what every file is for:
quickstart                                 `multilora-quickstart`: a small model and sample adapters answer
dynamo, serving                            the engine before NVIDIA Dynamo, and before Triton: tensors become requests
tritonserver                               starts NVIDIA's server, and watches it
process                                    the engine in a process of its own, and the way to it
quantize                                   `multilora quantize`
engine                                     which sequence runs in which step, and the answers
execution, sampling                        the run of a step on the device; logits become tokens
sequences, guides                          the state of requests; the form that answers must have
lora, models, text                         adapters in their tiers; the layers; text and token ids
batch                                      the tensors of one step
gguf                                       a GGUF file as a checkpoint directory

Files of all rooms:
config, lora_config                        every parameter, and the values that depend on the device
request, engine_info                       the records that cross the engine's door
errors, log_lines, histogram               errors of clients and operators; lines of logs; counts between bounds
out_of_memory, working_directory           errors for want of memory; directories written whole or not at all
sandbox, sandbox_process                   work that a client chose, in processes with limits
shared_python                              this Python, for the stubs of Triton's Python backend
"""
