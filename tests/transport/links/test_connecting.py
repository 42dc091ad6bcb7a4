"""What is told of connections that do not come about."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import pytest

from motley.transport.links import connecting


def test_windows_is_asked_what_its_numbers_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its C library knows none of a socket's: "Unknown error"."""
    assert connecting._told(errno.ECONNREFUSED) == os.strerror(errno.ECONNREFUSED)
    refused = {10061: "No connection could be made because the target machine actively refused it.\r\n"}
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "FormatError", refused.__getitem__, raising=False)
    assert connecting._told(10061) == "No connection could be made because the target machine actively refused it"
