"""Wire knowledge that client and engine share: sites of adapters, layouts, files. Imports no torch and no client.

sites, module_names                        the places where adapters may change a model, and their wire modules
  config_sites                             the sites of a checkpoint, from its config.json
layout, pieces                             the stored form of an adapter: sizes and places, no weights
converted_files                            the files of an adapter in the wire format
peft_config, peft_files                    PEFT's files as an adapter
  peft_experts                             the forms of adapters on the experts of a mixture
  tensor_file, bfloat16                    safetensors files; bfloat16 for NumPy
adapter_use                                what an adapter's folder says about its use
adapter_info, adapter_event                a server's report of an adapter; a line of its log
adapter_names, adapter_origin              names and task ids; the model that an adapter was made for
quantized, gguf                            quantised checkpoints; the files of llama.cpp
checkpoint_directory                       why a path is no checkpoint
headers                                    the headers by which a server knows who asks
messages, end_with_parent                  errors' texts of a bounded length; processes that end with their parent
"""
