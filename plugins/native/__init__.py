"""CPU operators of our own: C kernels, built by installation (`setup.py`), and the modules that call them."""
