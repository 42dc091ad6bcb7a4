"""The NCCL ABI over Motley's transport: whoever calls NCCL in this process talks over Motley.

`install` loads a small C library (`library.c`) under NCCL's name, so that what is linked against ``libnccl.so.2``
(``nccl.dll``), or opens it later, finds Motley's. Communicators come into being in two ways:

- a foreign program makes them as ever: ``ncclGetUniqueId`` in one process, ``ncclCommInitRank`` in all (`rendezvous`);
- `bind` gives what is there already, a mesh or a session's sums, the handle that TensorRT wants.

The library is built when Motley is installed (`setup.py`). NCCL's own ways of tuning (environment, ``ncclConfig_t``)
have no meaning here and are ignored; user-made reductions, windows and buffer registration are not offered.
"""

from motley.transport.collectives import Sums

from .binding import bind, install, release
from .codes import NcclError, Result
from .cuda import CudaDevice
from .memory import Device, Region

__all__ = ["CudaDevice", "Device", "NcclError", "Region", "Result", "Sums", "bind", "install", "release"]
