"""Matmuls of float32 activations by quantised weights that are used where they are: ``y = x @ W.T + bias``.

The arithmetic is stated in matmul.c. Results are the same to the bit on every CPU and for any number of threads, and a
row's do not depend on which other rows are computed with it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from .library import F32, U8, address, library, place
from .structs import Matmul

BLOCKS = (16, 32, 64, 128, 256)


class Pool:
    """Compute threads that matmuls and attention share; the thread that calls one of these computes, too.

    Calls from several threads take turns. Idle threads sleep.

    Args:
        threads: how many compute at once; of one, no thread is made.

    Raises:
        ImportError: the compiled kernels are missing.
        MemoryError: the system has no memory or threads left.
        ValueError: `threads` is not positive.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._library = library()
        self.handle = self._library.motley_pool_open(threads)
        if not self.handle:
            raise MemoryError(f"the system refuses a pool of {threads} threads")
        self._stop = weakref.finalize(self, _end, self._library, self.handle)

    def close(self) -> None:
        """End the threads; what they shared still works, on the calling thread alone."""
        self._library.motley_pool_stop(self.handle)


def _end(library: ctypes.CDLL, handle: int) -> None:
    library.motley_pool_stop(handle)
    library.motley_pool_free(handle)


class QuantisedMatrix:
    """f32[N, K] as (code - zero) * scale, in blocks along K; the arrays are used where they are and must outlive this.

    Args:
        codes: u8[N, K/block, block*bits/8]; of int4, elements 2i and 2i+1 are the low and the high nibble of byte i.
            May be read-only and lie anywhere.
        scales: f32[N, K/block]; may be negative.
        zeros: u8[N, K/block], of int4 packed like codes: u8[N, ceil(K/block/2)]; None: 8 for int4, 128 for int8.
        bias: f32[N].
        bits: 4 or 8.
        block: one of `BLOCKS`.
        pool: computes.
        heads: the matrix is those of so many heads, one below the other, each with N / heads rows.

    Raises:
        ValueError: what does not fit together; the message names the argument.
    """

    rows: int
    """N, the rows of the matrix."""
    columns: int
    """K, its columns."""
    matmul: Matmul
    """The matrix as kernels take it, without operands."""

    def __init__(
        self,
        codes: U8,
        scales: F32,
        zeros: U8 | None,
        bias: F32 | None,
        bits: int,
        block: int,
        pool: Pool,
        heads: int = 1,
    ) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        if block not in BLOCKS:
            raise ValueError(f"block must be one of {BLOCKS}, not {block}")
        if codes.ndim != 3:
            raise ValueError(f"codes must be u8[N, K/block, {block * bits // 8}], not of shape {codes.shape}")
        self.rows, blocks, _ = codes.shape
        if not blocks:
            raise ValueError("codes must have blocks")
        self.columns = blocks * block
        if heads < 1 or self.rows % heads:
            raise ValueError(f"heads must divide the {self.rows} rows of codes, and are {heads}")
        self.matmul = Matmul(
            pool=pool.handle,
            codes=address("codes", codes, np.uint8, self.rows, blocks, block * bits // 8),
            scales=address("scales", scales, np.float32, self.rows, blocks),
            zeros=None if zeros is None else address("zeros", zeros, np.uint8, self.rows, -(-blocks * bits // 8)),
            bias=None if bias is None else address("bias", bias, np.float32, self.rows),
            rows=self.rows // heads,
            columns=self.columns,
            heads=heads,
            bits=bits,
            block=block,
        )
        self._kept = (codes, scales, zeros, bias, pool)

    def bind(self, x: F32, y: F32) -> Callable[[], None]:
        """Fix the operands of a matmul; each call of the result then computes ``y = x @ W.T + bias``.

        Args:
            x: f32[M, K].
            y: f32[M, N], overwritten.

        Raises:
            MemoryError: there is no memory for quantised activations.
            ValueError: an operand has another shape or type, is not contiguous or aligned, or `y` is read-only.
        """
        return _computed(self.operands(x, y))

    def operands(self, x: F32, y: F32) -> Matmul:
        """As `bind`, for who has a kernel compute the matmul together with something else."""
        return self._operands(x, y, self.columns, 0)

    def bind_heads(self, x: F32, y: F32, first: int) -> Callable[[], None]:
        """As `bind`, but each head multiplies K elements of its own.

        Args:
            x: f32[M, heads * S].
            first: which of a head's S elements are the first that are multiplied.

        Raises:
            MemoryError, ValueError: as `bind`.
        """
        width = x.shape[1] if x.ndim == 2 else 0
        heads = self.matmul.heads
        if width % heads or not 0 <= first <= width // heads - self.columns:
            raise ValueError(f"x must be float32[M, {heads} * S], S at least {first + self.columns}, not {x.shape}")
        return _computed(self._operands(x, y, width, first))

    def _operands(self, x: F32, y: F32, width: int, first: int) -> Matmul:
        tokens = len(x) if x.ndim else 0
        matmul = Matmul.from_buffer_copy(self.matmul)
        matmul.x = address("x", x, np.float32, tokens, width) + x.itemsize * first
        matmul.x_token, matmul.x_head = width, width // matmul.heads
        matmul.y = place("y", y, np.float32, tokens, self.rows)
        matmul.tokens = tokens
        if not library().motley_prepare(matmul):
            raise MemoryError(f"no memory for the activations of {tokens} rows of {self.columns} columns")
        matmul.kept = (self._kept, x, y)
        return matmul


def _computed(matmul: Matmul) -> Callable[[], None]:
    return partial(library().motley_matmul, ctypes.byref(matmul))
