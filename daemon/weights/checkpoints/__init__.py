"""Formats of checkpoints: safetensors, GGUF, and those whose matrices are packed."""
