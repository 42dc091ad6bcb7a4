"""The CPU engine: quantised products and small steps by our own kernels, all else by ONNX Runtime."""
