"""The control plane's schema (`mesh.proto`) and its generated code (`make protocol`).

`VERSION` grows with every change that an older peer would misread; both sides refuse another one by name.
"""

VERSION = 3
MAX_RANKS = 64
"""Of one session; far above what tensor parallelism over a network can use."""
MAX_TRUNK = 32
"""Ranks that experts are elsewhere for; a call of an expert host names them by bits."""
BLOCKS = (16, 32, 64, 128, 256)
"""Weights along K that may share a scale, where they are quantised while loading."""
GPU_RESERVE = 512 << 20
"""Bytes of a GPU's free memory that no rank is planned into: CUDA's own, and what a desktop may want to draw."""

MESSAGE_BYTES = 64 << 20
"""Longest message of the control plane: an answer may carry its whole prompt back."""
