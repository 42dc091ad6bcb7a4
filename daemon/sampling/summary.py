"""What a rank tells of its slice of the vocabulary, and how that looks as bytes."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from motley.daemon.sampling.noise import F64, Ids
from motley.plugins.engine import F32

_HEADER = struct.Struct("<IIIIIIq")
_NONE = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)
_NO_MASSES = np.zeros(0, np.float64)


class SummaryError(ValueError):
    """Summaries are malformed or do not tile the vocabulary: the ranks do not agree on what they are doing."""


class Summary(NamedTuple):
    """What a rank tells of its slice. As bytes, it is little-endian: the header, then the arrays in this order."""

    offset: int
    """The first token of the slice."""
    rows: int = 0
    """Tokens in the slice."""
    invalid: int = -1
    """A token whose logit is NaN or +inf; -1: none."""
    log_masses: F64 = _NO_MASSES
    """Log-sum-exp of the adjusted logits over the temperature, of each block, if top-p needs it."""
    raw_log_masses: F64 = _NO_MASSES
    """Log-sum-exp of the raw logits, of each block, if log-probabilities were asked for."""
    ids: Ids = _NONE
    """Candidates, best first."""
    logits: F32 = _NO_VALUES
    """The adjusted logits of `ids`."""
    raw: F32 = _NO_VALUES
    """The raw logits of `ids`."""
    top_ids: Ids = _NONE
    """Tokens with the greatest raw logits, best first."""
    top_raw: F32 = _NO_VALUES
    """The raw logits of `top_ids`."""

    @property
    def exhausted(self) -> bool:
        """Whether the candidates are all that may be chosen of the slice."""
        return len(self.ids) == self.rows or bool(len(self.logits) and self.logits[-1] == -np.inf)

    def encode(self) -> bytes:
        """Write it as bytes."""
        header = _HEADER.pack(
            self.offset,
            self.rows,
            len(self.ids),
            len(self.top_ids),
            len(self.log_masses),
            len(self.raw_log_masses),
            self.invalid,
        )
        arrays: tuple[tuple[npt.NDArray[Any], str], ...] = (
            (self.log_masses, "<f8"),
            (self.raw_log_masses, "<f8"),
            (self.ids, "<u4"),
            (self.logits, "<f4"),
            (self.raw, "<f4"),
            (self.top_ids, "<u4"),
            (self.top_raw, "<f4"),
        )
        return header + b"".join(array.astype(kind).tobytes() for array, kind in arrays if len(array))

    @classmethod
    def decode(cls, data: bytes) -> Summary:
        """Read what `encode` has written.

        Raises:
            SummaryError: it is none.
        """
        if len(data) < _HEADER.size:
            raise SummaryError(f"a summary of {len(data)} bytes is shorter than its header")
        offset, rows, count, top_count, blocks, raw_blocks, invalid = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 8 * (blocks + raw_blocks) + 12 * count + 8 * top_count:
            raise SummaryError(f"a summary of {len(data)} bytes for {count} candidates and {top_count} tops")
        masses = np.frombuffer(data, "<f8", blocks + raw_blocks, _HEADER.size)
        words = np.frombuffer(data, "<u4", offset=_HEADER.size + masses.nbytes)
        values = words.view("<f4")
        tops = 3 * count
        return cls(
            offset,
            rows,
            invalid,
            masses[:blocks],
            masses[blocks:],
            words[:count].astype(np.int64),
            values[count : 2 * count],
            values[2 * count : tops],
            words[tops : tops + top_count].astype(np.int64),
            values[tops + top_count :],
        )
