"""The site that `make docs` builds: every link leads somewhere, in the repository and on the site."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built where its packages are")
ROOT = Path(__file__).parents[2]
SOURCES = ("mkdocs.yml", "docs", *(page.name for page in ROOT.glob("*.md")), "LICENSE", "bench/LOG.md", "bench/results")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, env=environment)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    start = (tmp_path / "index.html").read_text("utf-8")
    assert "Try it on one PC" in start
    assert 'href="docs/two-pcs/"' in start
    assert (tmp_path / "docs" / "page.png").exists()
    assert '<pre class="mermaid">' in (tmp_path / "ARCHITECTURE" / "index.html").read_text("utf-8")


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in SOURCES:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    with (root / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("[1](docs/gone.md) [2](docs/api.md#gone) [3](/docs/planning.md)\n")
    refused = build(root, tmp_path / "site")
    assert refused.returncode != 0
    warnings = [line for line in refused.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 3, refused.stderr
    for link in ("docs/gone.md", "docs/api.md#gone", "/docs/planning.md"):
        assert any(f"'{link}'" in line for line in warnings), refused.stderr
