"""Collectives on NVIDIA GPUs: sums on the device, exchanges on the host, all in the order of one CUDA stream.

What is tested without a GPU: the kernels compile for every architecture, their C++ computes the host's bits when it is
compiled for the host, and the order of everything on a driver that is made of host streams.

`driver.py` is all that calls CUDA, by CuPy where CuPy can. `compiler.py` compiles kernels, which `kept_kernels.py`
keeps on disk; `reduction.py` and `reduction.cu` sum in FP32, `host_step.py` has the ways in which a stream calls the
host, `stream.py` is a stream behind the contract of `motley.transport.streams`; `all_reduce.py` submits a collective
to it, `sum_memory.py` is what that takes. The packages of the extra `gpu` are imported where they are used, not before.
"""
