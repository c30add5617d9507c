"""A GGUF file as a checkpoint directory: what its metadata says, in Hugging Face's files. Imports no torch.

checkpoint                                 `prepare_gguf`: writes the directory, with links to the files of weights
model_fields                               config.json
tokenizer                                  tokenizer.json, tokenizer_config.json, chat templates, end tokens

`multilora_wire.gguf` reads the files. The weights stay where they are, and `multilora_engine.models` loads them.
"""
