"""The tensors of one step, and their way to the device. This room lies below models, lora and sampling.

forward_batch      `ForwardBatch`, `LoRABatch`, `KVCache`: the inputs of one forward pass, with a worked example
transfer           copies between host and device, without waiting for the device
"""
