"""GGUF files' metadata as the keys that families read."""
