"""The TensorRT engines: a rank's graph in TensorRT engines on one CUDA stream. Not yet run on a GPU."""
