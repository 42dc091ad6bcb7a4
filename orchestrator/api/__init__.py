"""The HTTP API: OpenAI's routes under ``/v1``, sessions and nodes under ``/api``."""
