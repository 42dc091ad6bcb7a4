"""GGUF files: their header, and the blocks that weights are stored in."""
