"""The pages of the site: those of docs/, and those that stand elsewhere in the repository, under their own paths.

So a link between two files is the same in the repository and on the site. mkdocs calls `on_files` (see mkdocs.yml).
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("*.md", "docs/*.md", "docs/*.png", "docs/*.json", "bench/LOG.md", "bench/results/*.png", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the files of the repository in the place of those that mkdocs has found in docs/; the theme's stay."""
    root = Path(config.config_file_path).parent
    theirs = [file for file in files if file.src_dir != config.docs_dir]
    found = sorted(path.relative_to(root).as_posix() for pattern in PAGES for path in root.glob(pattern))
    return Files([*theirs, *(File(path, str(root), config.site_dir, config.use_directory_urls) for path in found)])
