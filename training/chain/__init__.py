"""Training over several machines, each with some of a model's layers: activations go forward, gradients come back.

The *leader*, rank 0, has the data, the labels, the first layers and what comes before and after them all; every other
rank has a run of layers. The model's own code runs at the leader, whatever its family: what it hands to a layer that is
elsewhere crosses, and nothing else does.
"""
