"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Examples on a busy machine may be slow; each test has its own limit.
settings.register_profile("motley", deadline=None)
settings.load_profile("motley")
