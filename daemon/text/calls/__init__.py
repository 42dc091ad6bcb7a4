"""Calls of tools in a model's answer: how models write them, a grammar of them, and reading them."""
