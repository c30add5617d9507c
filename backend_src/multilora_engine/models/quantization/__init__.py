"""Weights of quantised checkpoints: their codes go into `QuantizedWeight`s as they are read, and stay codes.

format                                     `CheckpointFormat`: each weight as its checkpoint stores it
part                                       `QuantizedPart`: one linear of a checkpoint, and its tensors as NumPy arrays
weights                                    linears of one part or several

A new format of checkpoints begins in `multilora_wire.quantized`, which reads its files.
"""
