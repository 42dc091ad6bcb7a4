"""Engines for GPUs: a rank's graph by ONNX Runtime's WebGPU provider, or by another one for GPUs."""
