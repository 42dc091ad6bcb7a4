"""What processes say to each other, as schemas with generated code (`make protocol`), and the limits they agree on.

`mesh.proto` is what a node's daemon and the orchestrator say, `worker.proto` what a daemon and a worker process say.
`VERSION` grows with every change of `mesh.proto` that an older peer would misread; both sides refuse another one by
name. The pipe to a worker needs none: both ends are of one installation.
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
