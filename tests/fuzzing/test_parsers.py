"""Parsers of what strangers send or publish stand whatever a fuzzer finds, which goes by the lines that it reaches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest

from motley.daemon.rank.steps import Open, SpanPlan, Step
from motley.daemon.text.calls.formats import FORMATS
from motley.transport.links.wire import Handshake, Header, Membership, Op, Purpose
from tests.daemon.text.responses.cases import TEMPLATES
from tests.daemon.text.test_answer_parts import CASES
from tests.e2e.faces.test_fuzzing import BODIES, KEYS
from tests.fuzzing.targets import TARGETS
from tests.models.cases import GOLDEN

SECONDS = 60
"""For each parser."""
RUNS = 1000
"""That it takes at least in that time."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not find_spec("atheris"), reason="the fuzzer is for Linux on x86-64"),
]


def seeds(name: str, folder: Path) -> Sequence[bytes]:
    """What a parser reads, for the fuzzer to begin with."""
    configs = [file.read_bytes() for file in sorted(GOLDEN.glob("*/config.json"))]
    match name:
        case "frames":
            return [Header(Op.ALL_REDUCE, length=3).pack() + b"abc"]
        case "handshake":
            return [Handshake(Membership("fuzzed", 1, 1, 2, b"s" * 32, b"a" * 32), {(0, Purpose.DATA)}).start()]
        case "step_messages":
            numbers = np.arange(3, dtype=np.int32)
            step = Step([SpanPlan(0, 0, 3, 1, 4, numbers, numbers)], numbers, False)
            return [Open(0, 2, b"", numbers).encode(), step.encode()]
        case "requests":
            return [json.dumps(body).encode() for body in BODIES.values()]
        case "model_config":
            return configs
        case "response_template":
            return [json.dumps(written).encode() for written in TEMPLATES.values()]
        case "safetensors":
            header = json.dumps({"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}).encode()
            return [len(header).to_bytes(8, "little") + header + bytes(8)]
        case "gguf":
            writer = gguf.GGUFWriter(folder / "seed.gguf", "llama")
            writer.add_block_count(1)
            writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
            writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 4), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            return [(folder / "seed.gguf").read_bytes()]
        case _:
            return [bytes([FORMATS.index(form)]) + text.encode() for form, text, *_ in CASES if form in FORMATS]


def words(name: str) -> set[str]:
    """What the fuzzer may write of its own accord."""
    if name == "requests":
        return {*KEYS, *(key for body in BODIES.values() for key in body)}
    if name == "model_config":
        return {key for file in GOLDEN.glob("*/config.json") for key in json.loads(file.read_text())}
    return {"dtype", "shape", "data_offsets", "BF16", "general.alignment", "[TOOL_CALLS]", "</think>", "arguments"}


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_stands_whatever_a_fuzzer_finds(name: str, tmp_path: Path) -> None:
    corpus, dictionary = tmp_path / "corpus", tmp_path / "words"
    corpus.mkdir()
    for number, seed in enumerate(seeds(name, tmp_path)):
        (corpus / str(number)).write_bytes(seed)
    dictionary.write_text("".join(f'"{word}"\n' for word in sorted(words(name))))
    options = [f"-max_total_time={SECONDS}", f"-dict={dictionary}", "-max_len=5000", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, "-m", "tests.fuzzing", name, str(corpus), *options, "-rss_limit_mb=1024", "-timeout=10"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
    runs = re.search(r"Done (\d+) runs", done.stdout)
    assert runs
    assert int(runs[1]) > RUNS
