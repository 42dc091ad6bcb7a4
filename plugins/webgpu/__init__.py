"""The engine for GPUs of any make: a rank's graph by ONNX Runtime's WebGPU provider."""
