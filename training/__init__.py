"""Fine-tuning: adapters for models that the mesh serves, from data that stays where it is.

Torch, transformers, peft and scipy are the extra ``train``. They are imported when something is trained, and nowhere
outside this package; what needs none of them (data, the order of batches, checkpoints, merging) imports NumPy alone.
"""
