"""Lending a model's files to ranks on other nodes: asking for the bytes that a share needs, and giving them."""
