"""Files that must be found again: whole, and also where others read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motley.protocol import files
from motley.protocol.files import write_private


@pytest.mark.parametrize("refused", [0, 1, files.TIMES - 1, files.TIMES])
def test_a_file_that_somebody_reads_is_replaced_when_that_is_done(
    refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows has it: while it is open, it cannot be."""
    readers, replace = refused, os.replace

    def reading(new: Path, path: Path) -> None:
        if readers:
            raise PermissionError(13, "Access is denied", str(path))
        replace(new, path)

    def wait(seconds: float) -> None:
        nonlocal readers
        readers -= 1

    monkeypatch.setattr(os, "replace", reading)
    monkeypatch.setattr(files.time, "sleep", wait)
    file = tmp_path / "file"
    file.write_bytes(b"before")
    if refused < files.TIMES:
        write_private(file, b"after")
    else:
        with pytest.raises(PermissionError):
            write_private(file, b"after")
    assert file.read_bytes() == (b"after" if refused < files.TIMES else b"before")
    assert list(tmp_path.iterdir()) == [file]
