"""Frozen matrices in 4 or 8 bits, dequantised for the moment of a product, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
"""Values of a row that have a scale together."""
PIECE = 1 << 22
"""Values of a matrix that are dequantised at a time."""


class Codes(nn.Module):
    """A matrix f32[N, K] as codes of 4 or 8 bits: the value is (code - zero) * scale of its block, in float16.

    The scale is that of the block's value of largest magnitude over the lowest code, so that all levels are used.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.bits, self.columns, self.zero = bits, weight.shape[1], 1 << (bits - 1)
        padding = -self.columns % BLOCK
        blocks = functional.pad(weight.detach().float(), (0, padding)).unflatten(1, (-1, BLOCK))
        largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
        scales = (largest / -self.zero).to(torch.float16)
        steps = torch.where(scales == 0, 1, scales.float())
        codes = (blocks / steps).round_().clamp_(-self.zero, self.zero - 1).add_(self.zero).to(torch.uint8)
        if bits == 4:
            codes = codes[..., 0::2] | codes[..., 1::2] << 4
        self.register_buffer("packed", codes)
        self.register_buffer("scales", scales)

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        """The rows f32[C, K] with some numbers i64[C], or all of them."""
        packed, scales = (self.packed, self.scales) if chosen is None else (self.packed[chosen], self.scales[chosen])
        if self.bits == 4:
            packed = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = packed.to(torch.float32).sub_(self.zero).mul_(scales.float())
        return values.flatten(-2)[..., : self.columns]

    def pieces(self, chosen: Tensor | None = None) -> Sequence[Tensor]:
        """The numbers of the chosen rows, or of all, in pieces of `PIECE` values at most, as long as each other but the
        last."""
        numbers = torch.arange(len(self.packed)) if chosen is None else chosen
        pieces: Sequence[Tensor] = numbers.split(max(1, PIECE // self.columns))
        return pieces


class _Product(torch.autograd.Function):
    """x f32[..., K] times the transpose of codes of f32[N, K], or of some of their rows, i64[C]. What is kept for the
    way back are the codes alone, and of a large matrix some rows are dequantised at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Codes, chosen: Tensor | None) -> Tensor:
        ctx.codes, ctx.chosen = codes, chosen
        pieces = codes.pieces(chosen)
        if len(pieces) == 1:
            return x @ codes.rows(chosen).to(x.dtype).T
        made = x.new_empty(*x.shape[:-1], sum(map(len, pieces)))
        for part, piece in zip(made.split(len(pieces[0]), -1), pieces, strict=True):
            part.copy_(x @ codes.rows(piece).to(x.dtype).T)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes: Codes = ctx.codes
        pieces = codes.pieces(ctx.chosen)
        if len(pieces) == 1:
            return gradient @ codes.rows(ctx.chosen).to(gradient.dtype), None, None
        made = gradient.new_zeros(*gradient.shape[:-1], codes.columns)
        for part, piece in zip(gradient.split(len(pieces[0]), -1), pieces, strict=True):
            made += part @ codes.rows(piece).to(gradient.dtype)
        return made, None, None


class FrozenLinear(nn.Module):
    """A linear layer whose matrix f32[N, K] is quantised and not trained."""

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__()
        self.codes = codes
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.some(x, None)

    def some(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """What some rows i64[C] of the matrix make of x f32[..., K]: f32[..., C]; None: all of them."""
        product: Tensor = _Product.apply(x, self.codes, chosen)
        if self.bias is None:
            return product
        return product + (self.bias if chosen is None else self.bias[chosen])


class FrozenEmbedding(nn.Module):
    """Rows of a quantised matrix f32[V, K], looked up by tokens, and scaled as the model's own embedding does."""

    def __init__(self, codes: Codes, scale: float) -> None:
        super().__init__()
        self.codes, self.scale = codes, scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.codes.rows(tokens.flatten()).unflatten(0, tokens.shape) * self.scale


def quantise_base(model: nn.Module) -> None:
    """Replace, in a model with adapters, the matrices under them by int4, and head and embedding by int8.

    What has no adapter and is neither (norms, routers, experts that are one tensor) stays as it is.
    """
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    base: Any = model.get_base_model()
    for layer in [each for each in model.modules() if isinstance(each, LoraLayer)]:
        linear = layer.base_layer
        if isinstance(linear, nn.Linear | Conv1D):
            weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
            layer.base_layer = FrozenLinear(Codes(weight, 4), linear.bias)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    codes = Codes(embedding.weight, 8)
    tied = head.weight is embedding.weight
    scale = getattr(embedding, "embed_scale", 1.0)  # of Gemma, and of OPT's kin
    base.set_output_embeddings(FrozenLinear(codes if tied else Codes(head.weight, 8), head.bias))
    base.set_input_embeddings(FrozenEmbedding(codes, float(scale)))
