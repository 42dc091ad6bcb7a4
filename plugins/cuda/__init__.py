"""The GPU engine: our own CUDA kernels, and cuBLAS for prompts, on one stream."""
