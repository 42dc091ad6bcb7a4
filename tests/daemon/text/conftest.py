"""Model folders written for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.daemon.text.made_tokenizers import WriteFolder


@pytest.fixture
def folder(tmp_path: Path) -> WriteFolder:
    def write(backend: tokenizers.Tokenizer, template: str | None = None, **files: Any) -> Path:
        backend.save(str(tmp_path / "tokenizer.json"))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        for name, value in {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        return tmp_path

    return write
