"""A rank's graph on the device: its weights, its blocks of keys and values, the buffers of its values, its kernels.

Weights stay on the device as they lie in the share file (float32, float16, int8 or int4 blocks), and products read
them so. Only for the many rows of a prompt is float16 widened to scratch memory, a part of a matrix at a time, and
multiplied by cuBLAS, as float32 is, where that is installed.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from motley.plugins.cuda.cublas import Gemm
from motley.plugins.cuda.expert_groups import best_groups
from motley.plugins.cuda.experts import HeadMatrices, LayerExperts, heads_of, tables_of
from motley.plugins.cuda.kernels import BLOCKS, HEADS, INDEX_WIDTH, KINDS, THREADS, HeadPart, Matrix, View, pointer
from motley.plugins.cuda.modules import module_of, modules_for
from motley.plugins.cuda.quantised_values import normalised_sums, quantised_values
from motley.plugins.engine import Collectives, EngineError, RankGraph
from motley.plugins.known_nodes import is_number, is_stored, numbers_of
from motley.plugins.mapped_share import MappedShare, place_of
from motley.plugins.nodes import all_seen, attributes_of, only_for_choices
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.reduction import ALIGNMENT
from motley.transport.cuda.stream import CudaStream, DeviceArray
from motley.transport.cuda.sum_memory import SumMemory

log = logging.getLogger(__name__)

SCRATCH_BYTES = 64 << 20
"""The most that the widened part of a float16 matrix takes that cuBLAS multiplies by."""
UPLOAD_BYTES = 16 << 20
STEP_S = 1200.0
"""Longest step: its collectives have shorter deadlines of their own."""
_LAYER = re.compile(r"^layers\.[0-9]+\.")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceGraph:
    """The graph of one rank, with memory for steps of up to `max_rows` rows.

    Attributes:
        stream: what everything is submitted to.
        context: the most positions of a sequence.
        nodes: those that are submitted in a step, in order.
        matrices: what products multiply by, by the name of their second operand.
        experts: of each ``Experts`` node, by the name of its result.
        made_by: the node that makes a value.
        initializers: weights, by name.
        head_matrices: of each ``HeadProducts`` node, by the name of its result; heads are like experts that rows have
            chosen, all of them.
        groups: choices among groups of experts, by the scores that they make.
        quantised: values that are quantised as they are made, by name.
        normalised_sums: see the function of this name.
        blocks: in which keys and values are kept.
        caches: the addresses of the keys and of the values of every layer, in all its blocks, by the names of
            `motley.plugins.engine.CacheBlocks.arrays`.
        writing: the names of the attention nodes that write to their caches; others read what these have written.
        head_rows: how many rows of logits there is room for.
        values: where the values of a step that is being submitted are.
        parts: parts of heads likewise.
        gemm: what multiplies prompts by floats; None: our own kernels.
    """

    def __init__(
        self,
        graph: RankGraph,
        nodes: Sequence[onnx.NodeProto],
        stream: CudaStream,
        memory: ExitStack,
        max_rows: int,
        open_gemm: Callable[[CudaStream], Gemm] | None,
    ) -> None:
        """
        Args:
            nodes: see `motley.plugins.cuda.step.submitted_nodes`.
            memory: frees what is allocated here when it is closed.
            open_gemm: see `gemm`.

        Raises:
            EngineError: attention or quantised blocks of a size that there are no kernels for.
            CudaError: too little memory, or a device that nothing is compiled for.
        """
        self.stream = stream
        self.max_rows = max_rows
        self.hidden = graph.hidden
        self.context = graph.context
        self._driver = stream.driver
        self._memory = memory
        self._graph = graph
        proto = graph.proto.graph
        self.initializers = {tensor.name: tensor for tensor in proto.initializer}
        self.made_by = {output: node for node in proto.node for output in node.output}
        self.nodes = nodes
        self.for_choices = only_for_choices(proto.node, [value.name for value in proto.output])
        """Values that are for nothing but choosing among positions."""
        self.all_seen = all_seen(proto.node, graph.context)
        """Rows that see no more positions see all of them."""
        if any(spec.head_dim > max(HEADS) or spec.head_dim % 2 for spec in graph.caches):
            raise EngineError(f"engine 'cuda' has attention for heads of an even width up to {max(HEADS)}")
        if any(spec.index and spec.head_dim > INDEX_WIDTH for spec in graph.caches):
            raise EngineError(f"engine 'cuda' has index keys of up to {INDEX_WIDTH} elements; use engine 'onnxruntime'")
        if self.hidden % 4:
            raise EngineError(f"engine 'cuda' sums rows of a multiple of 4 elements, not of {self.hidden}")
        self._weights = self.allocate(max(1, graph.share_file.stat().st_size))
        self._constants = {
            tensor.name: self._send(onnx.numpy_helper.to_array(tensor))
            for tensor in proto.initializer
            if tensor.data_type == TensorProto.FLOAT and not is_stored(tensor) and not is_number(tensor)
        }
        """The addresses of floats of the graph itself that are the same for every row."""
        self.matrices = {
            node.input[1]: self._matrix(node, self.made_by) for node in self.nodes if node.op_type == "Gemm"
        }
        self.experts = {node.output[0]: self._experts(node) for node in self.nodes if node.op_type == "Experts"}
        self.head_matrices = {
            node.output[0]: self._head_matrices(node) for node in self.nodes if node.op_type == "HeadProducts"
        }
        tables = [table for each in self.experts.values() for table in (each.gate_up, each.down)]
        tables += [each.table for each in self.head_matrices.values()]
        kinds = {matrix.kind for matrix in (*self.matrices.values(), *(table.matrix for table in tables))}
        self._driver.compile(modules_for(kinds, graph.blocks.format, any(spec.index for spec in graph.caches)))
        self.groups = best_groups(proto)
        codes = {name: coded for name, matrix in self.matrices.items() if (coded := matrix.coded) is not None}
        self.quantised = quantised_values(self.nodes, proto, codes)
        self.normalised_sums = normalised_sums(self.nodes)
        self.blocks = graph.blocks
        self.caches = {
            name: self.zeros(graph.blocks.count_of(spec) * prod(shape) * np.dtype(dtype).itemsize)
            for spec in graph.caches
            for name, (shape, dtype) in graph.blocks.arrays([spec]).items()
        }
        first = {cache: node.name for node in reversed(proto.node) for cache in node.input if cache in self.caches}
        self.writing = {*first.values()}
        self.head_rows = 0
        self.values: dict[str, View] = {}
        self.parts: dict[str, HeadPart] = {}
        self._buffers: dict[tuple[str, int, int], View] = {}
        """The buffers of values, by name, width and number of rows."""
        self._reductions: dict[tuple[int, int, Collectives], AllReduce] = {}
        """The sums, by address, number of rows, and what they are summed through."""
        self._sum_memory = SumMemory(self._driver)
        memory.callback(self._sum_memory.close)
        self.scratch = self.scratch_bytes = 0
        """The address and size of the memory where cuBLAS finds widened weights; 0: none is needed."""
        floats = [each for each in self.matrices.values() if each.coded is None]
        self.gemm = self._open_gemm(open_gemm, floats) if open_gemm is not None and floats else None

    def _open_gemm(self, open_gemm: Callable[[CudaStream], Gemm], floats: Sequence[Matrix]) -> Gemm | None:
        try:
            gemm = open_gemm(self.stream)
        except CudaError as error:
            log.warning("prompts are computed by Motley's own kernels, which are slower than cuBLAS: %s", error)
            return None
        self._memory.callback(gemm.close)
        widest = [4 * each.outputs * each.columns for each in floats if not each.is_fp32]
        self.scratch_bytes = min(SCRATCH_BYTES, max(widest, default=0))
        if self.scratch_bytes:
            self.scratch = self.allocate(self.scratch_bytes)
        return gemm

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Memory on the device that is kept."""
        address = self._driver.allocate(nbytes)
        self._memory.callback(self._driver.free, address)
        return address

    def zeros(self, nbytes: int) -> int:
        """Memory on the device that is zero once the stream has come to it."""
        words = -(-nbytes // 4)
        address = self.allocate(max(1, 4 * words))
        self.fill(address, words)
        return address

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of the host that is kept, and that the device copies from and to."""
        pinned = self._driver.allocate_pinned(max(4, nbytes))
        self._memory.callback(self._driver.free_pinned, pinned)
        return pinned.host[:nbytes]

    def buffer(self, name: str, width: int, rows: int) -> View:
        """The place of a value, f32[rows, width], from now on also in `values`.

        Layers share buffers of the same width: a layer reads nothing of another but the residual, and finds that in the
        buffer that its own last node will write.
        """
        key = _LAYER.sub("", name), width, rows
        view = self._buffers.get(key)
        if view is None:
            view = View(self.allocate(4 * rows * max(1, width)), width, width)
            self._buffers[key] = view
        self.values[name] = view
        return view

    def upload(self) -> None:
        """Copy the weights of the share file to the device as they are."""
        share = MappedShare(self._graph.share_file)
        try:
            for tensor in self.initializers.values():
                if tensor.data_location == TensorProto.EXTERNAL:
                    self.send(self.address(tensor.name), share.bytes_of(tensor))
                    share.forget(tensor)
        finally:
            share.close()

    def send(self, address: int, source: Bytes) -> None:
        """Copy bytes of the host to the device, and wait for it."""
        staging = self._driver.allocate_pinned(max(1, min(UPLOAD_BYTES, len(source))))
        try:
            for start in range(0, len(source), UPLOAD_BYTES):
                chunk = source[start : start + UPLOAD_BYTES]
                staging.host[: len(chunk)] = chunk
                self._driver.copy(address + start, staging.host.ctypes.data, len(chunk), self.stream.handle)
                self.finish()
        finally:
            self._driver.free_pinned(staging)

    def address(self, name: str) -> int:
        """Where an initializer lies on the device."""
        constant = self._constants.get(name)
        return self._weights + place_of(self.initializers[name])[0] if constant is None else constant

    def is_number(self, name: str) -> bool:
        """Whether a value is one float of the graph itself, which kernels are given as an argument."""
        return is_number(self.initializers.get(name))

    def _send(self, array: np.ndarray[Any, Any]) -> int:
        """Take an array to the device, where it stays; its address."""
        address = self.allocate(max(1, array.nbytes))
        self.send(address, array.reshape(-1).view(np.uint8))
        return address

    def _head_matrices(self, node: onnx.NodeProto) -> HeadMatrices:
        matrix = self._matrix(node, self.made_by)
        return heads_of(matrix, attributes_of(node)["heads"], self.max_rows, self._send, node.name)

    def _experts(self, node: onnx.NodeProto) -> LayerExperts:
        """The experts of a layer; their tables go to the device."""

        def matrix_of(product: onnx.NodeProto, body: onnx.GraphProto) -> Matrix:
            return self._matrix(product, {output: each for each in body.node for output in each.output})

        return tables_of(node, matrix_of, self.address, self._send, numbers_of(self.initializers))

    def _matrix(self, node: onnx.NodeProto, made_by: Mapping[str, onnx.NodeProto]) -> Matrix:
        """What a product multiplies by; `made_by` has the nodes of its graph."""
        name = node.input[1]
        made = made_by.get(name)
        tensor = self.initializers[name if made is None else made.input[0]]
        outputs, columns = tensor.dims
        kind, run = KINDS[tensor.data_type]
        block, scales, zeros = 1, 0, 0
        if made is not None and made.op_type == "DequantizeLinear":
            block = attributes_of(made)["block_size"]
            _, scale, zero = made.input
            scales = self.address(scale)
            zeros = self.address(zero) if zero in self.initializers else 0
            if block not in BLOCKS:
                raise EngineError(f"engine 'cuda' has no kernel for blocks of {block} columns ({node.name})")
        elif columns % run:
            kind, run = f"odd_{kind}", 1
        return Matrix(kind, run, outputs, columns, block.bit_length() - 1, self.address(tensor.name), scales, zeros)

    # -- work --------------------------------------------------------------------------------------------------------

    def launch(self, kernel: str, threads: int, *arguments: Any, of_a_block: int = THREADS) -> None:
        """Submit a kernel with so many threads in all; none where there is nothing to do, as drivers refuse that. Its
        arguments are of ctypes."""
        if not threads:
            return
        self.stream.launch(module_of(kernel), kernel, -(-threads // of_a_block), of_a_block, arguments, early=True)

    def fill(self, address: int, elements: int) -> None:
        """Zero so many f32."""
        if elements:
            self.launch("fill", elements, pointer(address), ctypes.c_float(0), ctypes.c_longlong(elements))

    def finish(self) -> None:
        """Wait for all that has been submitted."""
        self.stream.synchronise(STEP_S)

    def all_reduce(self, rows: View, chunk: slice, summing: Collectives) -> None:
        """Sum some of the rows over all ranks, in place, in the stream's order."""
        address, size = rows.address + 4 * chunk.start * rows.width, 4 * (chunk.stop - chunk.start) * rows.width
        if address % ALIGNMENT:  # of narrow rows, which are few numbers
            place = self.buffer(f"sum of {rows.width}", rows.width, self.max_rows)
            self._driver.copy(place.address, address, size, self.stream.handle)
            self.all_reduce(place, slice(0, chunk.stop - chunk.start), summing)
            self._driver.copy(address, place.address, size, self.stream.handle)
            return
        key = address, chunk.stop - chunk.start, summing
        if key not in self._reductions:
            self.finish()  # what a sum is made of belongs to the steps of those before it
            array = DeviceArray(address, (key[1], rows.width), np.dtype(np.float32))
            self._reductions[key] = AllReduce(self.stream, summing, array, self._sum_memory)
        self._reductions[key].submit()
