"""What processes say to each other, as schemas with generated code (`make protocol`), and the limits they agree on.

`mesh.proto` is what a node's daemon and the orchestrator say, `worker.proto` what a daemon and a worker process say.
Machines whose releases differ agree on a version (`motley.protocol.versions`), or say which is to be updated. The pipe
to a worker needs none: both ends are of one installation.
"""

MAX_RANKS = 64
"""Ranks and expert hosts of a session at most; far above what tensor parallelism over a network can use."""
MAX_TRUNK = 32
"""Ranks at most in a session with expert hosts, in whose calls 32 bits name them."""
SEQUENCES, MAX_SEQUENCES = 64, 256
"""Requests of a session that are under way at a time, unless it is asked for with more or fewer; and at most."""
QUEUE, MAX_QUEUE = 256, 4096
"""Requests that may wait beside those."""
OWN_HEAD = "own"
"""The draft model that is no other model but the model's own head, which some have to predict tokens further ahead."""
WHETHER_TO_THINK = ("enable_thinking", "thinking")
"""What chat templates call it: those of Qwen 3, GLM, Gemma 4 and SmolLM3, and those of DeepSeek V3.1 and Granite."""
LEADER = 0
"""The member of a training job that leads it, on the node that has the data; and its rank, where the job is a chain."""
MAX_ADAPTERS = 256
"""Of a session, at a time."""
MAX_ADAPTER_RANK = 1024
BLOCKS = (16, 32, 64, 128, 256)
"""How many weights along K may share a scale, where they are quantised while loading."""
CACHE_BLOCK = 32
"""Positions in a block of KV caches, unless an engine of the session can only have whole caches."""
CACHE_STRETCH = 128
"""Positions in a block of a session that has some on nodes which are none of its ranks: attention is computed to as
many at a time, here or there."""
SNAPSHOTS = 1
"""Recurrent states of a model that can be kept to begin with, for each sequence that may be under way."""
GPU_RESERVE = 512 << 20
"""Bytes of a GPU's free memory that no rank is planned into: CUDA's own, and what a desktop may want to draw."""

MESSAGE_BYTES = 64 << 20
"""Bytes of the longest message of the control plane: an answer may carry its whole prompt back."""
