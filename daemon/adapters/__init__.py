"""Adapters (LoRA): read and checked against a model, cut as a rank's share is, kept on this disk."""
