"""The language that models are described in: weights with named axes, and operations on them."""
