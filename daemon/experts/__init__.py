"""Experts on other nodes: asking expert hosts for what they compute, and being one."""
