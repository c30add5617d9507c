"""One step on the device: its inputs, the forward pass, CUDA graphs.

model_runner       builds the batch of a scheduled step (`ModelRunner.build_batch`) and runs it, up to the chosen tokens
cuda_graphs        a decode step's batch copied into static tensors, and the graph's replay (`DecodeGraphs.run`)
piecewise_graphs   steps with prompts, captured around their attention (`PiecewiseGraphs.run`)
device_probe       whether an error of the device was its end
graph_check        captured steps compared with their kernels one by one, once at start
self_test          operators compared with the reference, once at start; progress of the start in the log
step_memory        the memory that steps take on a GPU, measured at start
warm_up            the kernels of all steps on a GPU, compiled at start
"""
