"""From a description to the ONNX graph of a rank, or of an expert."""
