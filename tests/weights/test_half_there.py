"""Quantised matrices of which a part is absent, of another shape or of another type are refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints.bitsandbytes_checkpoint import BitsAndBytes
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.compressed_checkpoint import CompressedInts
from motley.daemon.weights.checkpoints.fp8_checkpoint import Fp8Blocks
from motley.daemon.weights.checkpoints.nvfp4_checkpoint import Nvfp4Blocks
from motley.daemon.weights.checkpoints.tensor_files import TensorFiles
from motley.daemon.weights.spec import Piece
from tests.weights.packing import Array, Tensors, compressed, fp8, nf4, nvfp4, random_matrix, save

X = "layer.x.weight"
ROWS, COLUMNS = 24, 128
ORDER = np.random.default_rng(0).permutation(np.arange(COLUMNS) // 32)
INTS, _ = compressed(*random_matrix(ROWS, COLUMNS, 32, 4, 0), 4, ORDER)
FP4, _ = nvfp4(ROWS, COLUMNS, 0, modelopt=True)
NF4, _ = nf4(ROWS, COLUMNS, 0, nested=True)
FP8, _ = fp8(ROWS, COLUMNS, 0, (ROWS, 1))
STATE = "weight.quant_state.bitsandbytes__nf4"


def opened(folder: Path, parts: Tensors, kind: str) -> TensorFiles:
    save(folder, {f"layer.x.{part}": np.ascontiguousarray(values) for part, values in parts.items()})
    packing = {
        "ints": CompressedInts(4, 32, symmetric=False, reordered=True),
        "nvfp4": Nvfp4Blocks(),
        "nf4": BitsAndBytes(),
        "fp8": Fp8Blocks(),
    }[kind]
    return packing.open(folder)


def without(parts: Tensors, part: str) -> Tensors:
    return {name: values for name, values in parts.items() if name != part}


def state(**changes: object) -> Array:
    told = json.loads(NF4[STATE].tobytes()) | changes
    return np.frombuffer(json.dumps(told).encode(), np.uint8)


@pytest.mark.parametrize(
    ("kind", "parts", "complaint"),
    [
        ("ints", without(INTS, "weight_scale"), r"'layer\.x\.weight_scale' is absent"),
        ("ints", without(INTS, "weight_zero_point"), r"'layer\.x\.weight_zero_point' is absent"),
        ("ints", without(INTS, "weight_shape"), r"'layer\.x\.weight_shape' is absent"),
        ("ints", without(INTS, "weight_g_idx"), r"'layer\.x\.weight_g_idx' is absent"),
        ("ints", without(INTS, "weight_packed"), r"'layer\.x\.weight' is absent"),
        (
            "ints",
            INTS | {"weight_g_idx": INTS["weight_g_idx"] + 1},
            r"g_idx' puts columns in groups 1 to 4",
        ),
        ("ints", INTS | {"weight_packed": INTS["weight_packed"][1:]}, r"is I32\[23, 16\], which is not a matrix"),
        ("ints", INTS | {"weight_scale": INTS["weight_scale"][:, 1:]}, r"_scale' has shape \[24, 3\]; .* \[24, 4\]"),
        ("ints", INTS | {"weight_shape": np.array([24, 127])}, r"cannot be in groups of 32 columns"),
        ("nvfp4", without(FP4, "weight_scale"), r"'layer\.x\.weight_scale' is absent"),
        ("nvfp4", without(FP4, "weight_scale_2"), r"'layer\.x\.weight_scale_2' is absent"),
        ("nvfp4", FP4 | {"weight_scale": FP4["weight_scale"][:, 1:]}, r"bytes \[24, 64\] and scales \[24, 7\]"),
        ("nvfp4", FP4 | {"weight_scale_2": np.ones(2, "f4")}, r"weight_scale_2' has shape \[2\]; one number"),
        ("nf4", without(NF4, "weight.quant_map"), r"'layer\.x\.weight\.quant_map' is absent"),
        ("nf4", without(NF4, "weight.nested_absmax"), r"'layer\.x\.weight\.nested_absmax' is absent"),
        ("nf4", NF4 | {"weight.absmax": NF4["weight.absmax"][1:]}, r"absmax' has 47 bytes; its state makes it 48"),
        ("nf4", NF4 | {STATE: np.frombuffer(b"{}", np.uint8)}, r"bitsandbytes__nf4' is not the state of a matrix"),
        ("nf4", NF4 | {STATE: state(blocksize=256)}, r"a matrix \[24, 128\] in blocks of 256; rows have to be"),
        ("fp8", without(FP8, "weight_scale"), r"'layer\.x\.weight_scale_inv' is absent"),
        ("fp8", FP8 | {"weight_scale": np.ones((24, 2), "f4")}, r"has scales \[24, 2\]; one for the matrix, or one"),
    ],
)
def test_what_is_missing_is_named(kind: str, parts: Tensors, complaint: str, tmp_path: Path) -> None:
    def read(files: TensorFiles) -> None:
        files.expect({X: (ROWS, COLUMNS)})
        files.read(Piece(X, range(1), range(COLUMNS)))

    with opened(tmp_path, parts, kind) as files, pytest.raises(CheckpointError, match=complaint):
        read(files)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_piece_is_what_the_formats_define(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind = data.draw(st.sampled_from(["ints", "nvfp4", "nf4", "fp8"]))
    parts, expected = {
        "ints": lambda: compressed(*random_matrix(ROWS, COLUMNS, 32, 4, 0), 4, ORDER),
        "nvfp4": lambda: nvfp4(ROWS, COLUMNS, 0, modelopt=data.draw(st.booleans())),
        "nf4": lambda: nf4(ROWS, COLUMNS, 0, nested=data.draw(st.booleans())),
        "fp8": lambda: fp8(ROWS, COLUMNS, 0, data.draw(st.sampled_from([(), (1,), (ROWS,), (ROWS, 1)]))),
    }[kind]()
    rows, columns = (range(*sorted(data.draw(st.integers(0, size)) for _ in "ab")) for size in (ROWS, COLUMNS))
    with opened(tmp_path_factory.mktemp(kind), parts, kind) as files:
        files.expect({X: (ROWS, COLUMNS)})
        got = files.read(Piece(X, rows, columns))
        np.testing.assert_allclose(got, expected[rows.start : rows.stop, columns.start : columns.stop], rtol=1e-6)
        np.testing.assert_allclose(files.rows(X, [5, 0, 5]), expected[[5, 0, 5]], rtol=1e-6)
