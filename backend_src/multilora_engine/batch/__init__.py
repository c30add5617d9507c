"""The tensors of one step, and their way to the device. Lies below models, lora and sampling, and needs kernels alone.

forward_batch      `ForwardBatch`, `LoRABatch`, `KVCache`: what one forward pass needs, with a worked example
transfer           copies between host and device, without waiting for the device
"""
