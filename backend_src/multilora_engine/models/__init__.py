"""Models: plain functions of their weights and a `ForwardBatch`. A model describes itself, and all else reads that.

model                                      `Model`: the engine's requirements; `adapter_sites`, `kv_groups` and others
registry                                   the families that are served, and how to add one
llama, gemma, phi3, glm4, olmo2, ...       a family each: its numbers and its layers
  cohere2, starcoder2, moe, gpt_oss
decoder                                    `Decoder`: embeddings, layers, norm, head
encoder_decoder                            `EncoderDecoder`: a decoder with an encoder before it
  t5, bart                                 its families
  layers, norms, rotary                    the pieces that layers are made of
  linear                                   `LoRALinear`: a linear, with each token's adapter on top
general/                                   decoders of transformers' modules, where no family of ours computes
weights, builder, quantization/            how weights are stored, and which tensors of a checkpoint fill them
loader, checkpoint, gguf_weights           reads the files of a checkpoint
model_config, hf_config, rope_config       `config.json`, read and checked
"""
