"""GGUF, the files of llama.cpp (ggml `docs/gguf.md`), read with NumPy alone, by engine and client alike.

file                                       `GGUFFile`: the metadata and the places of the tensors, read and checked
blocks                                     the types of tensors: codes with scales and minimums in blocks
names                                      the tensors' names in Hugging Face's checkpoints, and the order of their rows
checkpoint                                 `read_tensors`: of the directory that is made for files
adapter                                    `GGUFAdapter`: an adapter as PEFT's files
"""
