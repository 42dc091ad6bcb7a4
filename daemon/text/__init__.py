"""Text to tokens and back: tokenizers, chat templates, stops, calls of tools."""
