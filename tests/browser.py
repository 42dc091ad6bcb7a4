"""The browser that tests of the page start."""

from __future__ import annotations

import shutil

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first is the same browser without windows: a fifth less work for the tests of the page."""
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""Where it is; None without one."""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
