"""Guesses of the next tokens: looked up in the text, or by a draft model."""
