"""Requests that become token ids, and tokens that become text."""
