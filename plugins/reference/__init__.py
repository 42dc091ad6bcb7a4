"""The reference engine: the graph node by node, with NumPy or CuPy. It says what every engine must compute."""
