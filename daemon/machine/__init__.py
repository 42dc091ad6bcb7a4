"""This machine as its system tells of it: memory, processor, GPUs, files, other programs."""
