"""Blocks of a rank's KV caches on another node: asking a cache holder for attention to them, and being one."""
