"""Makes a quantised checkpoint of a checkpoint in floats, in compressed-tensors' format. Needs the extra `quantize`.

quantization                               `multilora quantize`: check, measure, calibrate, write, measure again
plan, schemes                              which tensors become codes, by which scheme
scales                                     finds the scales with the least loss
calibration, compensation                  rounds linears so that their outputs on a text change least
checkpoint                                 writes the checkpoint, and reads it back
measure, text                              perplexity on a text
"""

from multilora_engine.quantize.checkpoint import dequantized_weights
from multilora_engine.quantize.measure import replace_weights
from multilora_engine.quantize.plan import OuterOptions
from multilora_engine.quantize.quantization import Report, quantize_checkpoint
from multilora_engine.quantize.schemes import Scheme
from multilora_engine.quantize.text import SAMPLE_TEXT

__all__ = [
    "SAMPLE_TEXT",
    "OuterOptions",
    "Report",
    "Scheme",
    "dequantized_weights",
    "quantize_checkpoint",
    "replace_weights",
]
