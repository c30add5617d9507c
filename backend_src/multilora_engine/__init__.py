"""One base model, thousands of LoRA adapters: the engine and its Triton Inference Server front."""
