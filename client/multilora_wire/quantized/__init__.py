"""Quantised checkpoints as their writers lay them out, read with NumPy alone, by engine and converter alike.

quantization                               the scheme of each linear of a checkpoint directory
scheme                                     `Scheme`: how one linear is stored; a new format is one of these
compressed_config, packed_layouts          `quantization_config` as compressed-tensors and as other tools write it
compressed, gptq, awq, mxfp4, ggml         the storage of each format
  bits                                     integers of 2 to 8 bits in 32-bit words
adapter_rules, names                       modules that adapters may change; patterns of modules
fields                                     values of a JSON object, with their types

The engine's side is `multilora_engine.models.quantization`.
"""
