"""Torch with one thread: as many pytest processes as cores, each with as many threads that spin, hinder each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in processes that tests start
