"""What docs/transport.md shows of the transport runs as it stands there."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transport.md"


def free_pair() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with closing(socket.create_server(("127.0.0.1", 0))) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def test_the_snippet_sums_between_two_processes(tmp_path: Path) -> None:
    section = PAGE.read_text("utf-8").partition("## The transport alone")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    port = free_pair()
    script = tmp_path / "ranks.py"
    script.write_text(snippet.replace("5000", str(port)).replace("5001", str(port + 1)))
    ranks = [
        subprocess.Popen([sys.executable, str(script), rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert (out.strip(), err) == ("[3. 3. 3. 3.]", "")
        assert out.strip() in section
