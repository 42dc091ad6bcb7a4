"""CPU operators of our own: C kernels, built by installation (`setup.py`), called through `matmul` and `rows`."""
