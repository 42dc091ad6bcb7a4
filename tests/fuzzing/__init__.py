"""Parsers of what strangers send or publish, given bytes by a fuzzer that goes by which lines they reach."""
