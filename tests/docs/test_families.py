"""docs/sessions.md names every family of models that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from motley.daemon.models.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "sessions.md"


def test_the_list_of_families_is_that_of_the_code() -> None:
    section = PAGE.read_text("utf-8").partition("\n## Models\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    named = re.findall(r"`(\w+)`", "\n".join(rows))
    assert sorted(named) == sorted(name.removesuffix("_text") for name in FAMILIES)
