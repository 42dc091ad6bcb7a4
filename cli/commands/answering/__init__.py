"""Commands that get answers from a model."""
