"""Decoders of transformers that no file of ours computes: transformers' modules, with our linears, attention and cache.

All of it imports transformers, and nobody imports it before a model needs it.

config            reads config.json, and refuses what cannot run, with the reason
tree, trace       the modules without weights; what one forward pass without numbers tells of them
modules, model    linears, embeddings and head of ours in their places; `GeneralModel`
tensor_names      which tensor of a checkpoint belongs to which module
probe             our attention beside transformers' own, once at the load
"""
