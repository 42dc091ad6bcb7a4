"""FP8 with a scale for each block: every piece is what the format says, and a model is that of its values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model, open_weights
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.fp8_checkpoint import Fp8Blocks, Fp8Checkpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Piece
from tests.models.cases import GOLDEN, uneven_shares
from tests.weights.test_located import bits, some

FP8 = ml_dtypes.float8_e4m3fn
Arrays = dict[str, np.ndarray[Any, Any]]
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}


def in_fp8(matrix: np.ndarray[Any, Any], rows: int = 16, columns: int = 24) -> tuple[Arrays, np.ndarray[Any, Any]]:
    """``X`` and ``X_scale_inv`` of a matrix, by their suffixes, and the values that they stand for."""
    codes, scales = (
        np.empty(matrix.shape, FP8),
        np.empty((-(-len(matrix) // rows), -(-matrix.shape[1] // columns)), "f4"),
    )
    values = np.empty(matrix.shape, np.float32)
    for block in np.ndindex(scales.shape):
        place = tuple(slice(at * size, (at + 1) * size) for at, size in zip(block, (rows, columns), strict=True))
        scales[block] = np.abs(matrix[place]).max() / 448
        codes[place] = (matrix[place] / scales[block]).astype(FP8)
        values[place] = codes[place].astype(np.float32) * scales[block]
    return {"": codes, "_scale_inv": scales}, values


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_piece_is_what_the_format_says(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of a matrix, or of one of several in a tensor; steps among them, and what is stored as floats."""
    folder = tmp_path_factory.mktemp("fp8")
    whole = np.random.default_rng(0).standard_normal((3, 37, 50)).astype(np.float32)
    made = [in_fp8(matrix) for matrix in whole]
    stacked = {f"X{part}": np.stack([parts[part] for parts, _ in made]) for part in ("", "_scale_inv")}
    save_file({**stacked, "plain": whole[0], "gain": whole[0, 0]}, folder / "model.safetensors")
    number, rows, columns = data.draw(st.integers(0, 2)), some(data, 37), some(data, 50)
    rows = rows[:: data.draw(st.integers(1, 3))]
    with Fp8Checkpoint(folder, Fp8Blocks(16, 24)) as files:
        files.expect({f"X[{number}]": (37, 50), "X": (3, 37, 50), "plain": (37, 50)})
        assert files.format(f"X[{number}]").called == "F8_E4M3"
        values = files.read(Piece(f"X[{number}]", rows, columns))
        plain = files.read(Piece("plain", rows, columns))
        assert bits(files.read(Piece("gain", columns))) == bits(whole[0, 0, columns.start : columns.stop])
    region = np.ix_(list(rows), list(columns))
    assert bits(values) == bits(made[number][1][region])
    assert bits(plain) == bits(whole[0][region])
    shutil.rmtree(folder)


def test_a_model_is_that_of_its_values(tmp_path: Path) -> None:
    """Its layer that predicts further ahead is in FP8, too, and of no use."""
    case = GOLDEN / "deepseek-v3"
    floats: Arrays = {}
    codes: Arrays = {}
    for name, values in load_file(case / "model.safetensors").items():
        matrix = name.endswith("_proj.weight")
        parts, read = in_fp8(values.astype(np.float32)) if matrix else ({"": values}, values)
        floats[name] = np.ascontiguousarray(read)
        codes |= {name + part: own for part, own in parts.items()}
    config = json.loads((case / "config.json").read_text())
    shares = []
    for called, tensors, more in (("floats", floats, {}), ("fp8", codes, {"quantization_config": CONFIG})):
        folder = tmp_path / called
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
        with open_model(folder) as opened:
            cut = units(opened.model, "stored", 32, opened.stored)
            declared = build_rank_graph(opened.model, uneven_shares(cut, 3), 0, "stored", 32, 64, opened.stored)
            write_share(opened.source, declared.weights, declared.share_bytes, tmp_path / "share")
        shares.append((tmp_path / "share").read_bytes())
    assert shares[0] == shares[1]


def folder_of(tmp_path: Path, tensors: Arrays, **changes: Any) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG | changes}))
    return tmp_path


PARTS = {f"X{part}": own for part, own in in_fp8(np.ones((32, 48), np.float32))[0].items()}


def test_scales_of_other_blocks_are_refused_by_name(tmp_path: Path) -> None:
    files = open_weights(folder_of(tmp_path, PARTS, weight_block_size=[16, 16]))
    with files, pytest.raises(CheckpointError, match=r"'X' \[32, 48\] of FP8 has scales \[2, 2\]; blocks of 16 rows"):
        files.read(Piece("X", range(1), range(16)))


def test_absent_scales_are_named(tmp_path: Path) -> None:
    files = open_weights(folder_of(tmp_path, PARTS | {"Y": PARTS["X"]}))
    with files, pytest.raises(CheckpointError, match="tensor 'Y_scale_inv' is absent"):
        files.read(Piece("Y", range(1), range(16)))


def test_a_config_that_says_fp8_of_floats(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says FP8, but no tensor is packed \(X_scale_inv\)"):
        open_weights(folder_of(tmp_path, {"X": np.ones((2, 2), np.float32)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fmt", "e5m2"),
        ("activation_scheme", "of tomorrow"),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_config\.{key} = .* is not supported"):
        open_weights(folder_of(tmp_path, PARTS, **{key: value}))
