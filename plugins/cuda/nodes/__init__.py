"""How each kind of node of a rank's graph becomes kernels in a step that is being submitted."""
