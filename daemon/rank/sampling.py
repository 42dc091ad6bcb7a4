"""Choosing the next token when every rank holds the logits of its own slice of the vocabulary.

Logits never travel. Every rank *summarises* its slice (its best candidates, the sums that a filter or a report
needs) and the leader *chooses* from the summaries. Same logits, parameters and seed give the same token however
the vocabulary is cut. One step of one sequence:

1. every rank: ``summary = sampler.summarise(logits, step, want)``, with ``want = initial_want(params)`` at first;
2. the leader, with all summaries gathered: ``choose(summaries, params, step)``. A `NeedMore` says that the
   candidates do not yet prove which tokens may be sampled: all ranks repeat 1 with its ``want``;
3. every rank: ``sampler.accept(choice.token)``.

The order is the one of Hugging Face and vLLM: penalties and bias, temperature, top-k, top-p, min-p. The draw is
Gumbel-max: of the allowed tokens, the one with the greatest ``logit / temperature + noise``, where the noise is a
function of (seed, step, token id) alone, so that every rank can draw for its slice. Exactly `top_k` tokens pass
the top-k filter, ties going to the lower id (Hugging Face keeps all that tie). Log-probabilities are those of the
model: log-softmax of the raw logits, before penalties, bias and temperature.

Sums over the vocabulary are taken block by block, then over the blocks of all ranks, so that they have the same bits
wherever slices begin at borders of blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from motley.protocol import mesh_pb2

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class SamplingError(ValueError):
    """A sampling parameter is out of range; the message names it and the range."""


class LogitsError(ArithmeticError):
    """There is nothing to choose from: logits are NaN or +inf (a rank computed wrongly), or all of them -inf."""


class SummaryError(ValueError):
    """Summaries are malformed or do not tile the vocabulary: the ranks do not agree on what they are doing."""


GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""

RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, 100),
        "top_k": (0, 2**31 - 1),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (0, 2**64 - 1),
        "top_logprobs": (0, 20),
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. The defaults switch everything off: greedy decoding of the raw logits.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of every token in the prompt or the
            output (Keskar et al. 2019, as in Hugging Face). 1: off.
        presence_penalty: subtracted from the logit of every generated token (OpenAI). 0: off.
        frequency_penalty: subtracted once for each time a token was generated (OpenAI). 0: off.
        logit_bias: token id -> added last, so that -100 bans a token.
        top_logprobs: alternatives to report per token, beside the chosen one.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails too
                raise SamplingError(f"{name} must be between {low} and {high}, not {value}")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise SamplingError(f"logit_bias of token {token} must be between -100 and 100, not {bias}")
        if self.top_logprobs and not self.logprobs:
            raise SamplingError("top_logprobs needs logprobs to be true")

    @classmethod
    def from_proto(cls, message: mesh_pb2.Sampling) -> SamplingParams:
        """Read the wire form, in which every field is set (protobuf's zero is a value here, not a default)."""
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            logit_bias=dict(message.logit_bias),
            logprobs=message.logprobs,
            top_logprobs=message.top_logprobs,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether a filter can forbid tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Choice:
    """The token of a step; `logprob` and `top` (best first) are there if log-probabilities were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class NeedMore:
    """The candidates are too few: every rank must summarise again with this `want`."""

    want: int


def initial_want(params: SamplingParams) -> int:
    """Candidates to ask of every rank at first: as many as a choice nearly always needs, and no more."""
    if params.greedy or not params.truncated:
        return 1
    return params.top_k or 64


# ---------------------------------------------------------------- noise

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIXER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BLOCK = 8192
"""Rows per pass of the noise: temporaries stay in the cache and in the allocator's free lists."""


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in _MIXER:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> 31)


def gumbel(seed: int, step: int, ids: Ids) -> F64:
    """Standard Gumbel noise of the given tokens, f64[n]: a function of (seed, step, id), whatever else is asked.

    The uniform behind it is output `id` of SplitMix64 (Steele et al. 2014) started at a hash of (seed, step),
    its upper 52 bits placed strictly inside (0, 1).
    """
    state = ids.astype(np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64(_mix(_mix(seed + _GOLDEN) + step * _GOLDEN))
    for shift, factor in _MIXER:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    noise = (state >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


# ---------------------------------------------------------------- every rank


class ShardSampler:
    """One rank's part in sampling one sequence.

    Args:
        offset: the token id of this rank's first vocabulary row.
        size: V_r, the rows of this rank's slice; may be 0.
        prompt: all token ids of the prompt, whichever slice they are in.
        block: tokens whose masses are summed first, counted from token 0; the same on all ranks.
    """

    def __init__(self, params: SamplingParams, offset: int, size: int, prompt: Sequence[int], block: int) -> None:
        self._params = params
        self._offset = offset
        self._size = size
        self._blocks = np.array([0, *range(block - offset % block, size, block)], np.int64)
        """First rows of the blocks that this slice has a part of."""
        bias = [(token - offset, value) for token, value in params.logit_bias.items()]
        bias = [(row, value) for row, value in bias if 0 <= row < size]
        self._bias_rows = np.array([row for row, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        rows = np.unique(np.asarray(prompt, np.int64)) - offset
        self._seen = rows[(rows >= 0) & (rows < size)]
        """Rows of this slice whose token is in the prompt or the output."""
        self._counts = np.zeros(len(self._seen), np.float32)
        """How often each of those was generated."""

    def accept(self, token: int) -> None:
        """Count a generated token. Every rank must accept every token, in order."""
        row = token - self._offset
        if not self._penalised or not 0 <= row < self._size:
            return
        known = np.flatnonzero(self._seen == row)
        if len(known):
            self._counts[known[0]] += 1
        else:
            self._seen = np.append(self._seen, row)
            self._counts = np.append(self._counts, np.float32(1))

    def summarise(self, logits: F32, step: int, want: int) -> bytes:
        """What the leader must know of this slice.

        Args:
            logits: f32[V_r]{tp}, raw; not changed.
            step: tokens generated before this one.
            want: how many candidates to report; all of the slice if it has no more than that.
        """
        if logits.shape != (self._size,):
            raise ValueError(f"logits of shape {logits.shape} for a slice of {self._size} rows")
        params = self._params
        if not self._size:
            return _Summary(offset=self._offset).encode()
        adjusted = self._adjust(logits)
        first = int(np.argmax(adjusted))  # a NaN, if there is one
        if not adjusted[first] < np.inf:
            return _Summary(offset=self._offset, rows=self._size, invalid=self._offset + first).encode()

        if params.greedy or params.truncated:
            rows = _best(adjusted, 1 if params.greedy else want, first)
        else:
            rows = self._noisiest(adjusted, step)
        summary = _Summary(
            offset=self._offset,
            rows=self._size,
            ids=rows + self._offset,
            logits=adjusted[rows],
            raw=logits[rows],
        )
        if params.top_p < 1 and not params.top_k and not params.greedy:
            summary = summary._replace(log_masses=_log_sums_exp(adjusted, self._blocks, params.temperature))
        if params.logprobs:
            top = _best(logits, params.top_logprobs, int(np.argmax(logits)))
            summary = summary._replace(
                raw_log_masses=_log_sums_exp(logits, self._blocks), top_ids=top + self._offset, top_raw=logits[top]
            )
        return summary.encode()

    def _adjust(self, logits: F32) -> F32:
        """Penalties, then bias; a copy if there are any."""
        params = self._params
        if not self._penalised and not len(self._bias_rows):
            return logits
        adjusted = logits.copy()
        if self._penalised:
            values = adjusted[self._seen]
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values < 0, values * penalty, values / penalty)
            values -= np.float32(params.frequency_penalty) * self._counts
            values -= np.float32(params.presence_penalty) * (self._counts > 0)
            adjusted[self._seen] = values
        adjusted[self._bias_rows] += self._bias
        return adjusted

    def _noisiest(self, adjusted: F32, step: int) -> Ids:
        """The one row that wins the Gumbel-max draw of this slice."""
        params = self._params
        best, best_score = 0, -np.inf
        for start in range(0, self._size, _BLOCK):
            block = adjusted[start : start + _BLOCK].astype(np.float64)
            ids = np.arange(start, start + len(block)) + self._offset
            block /= params.temperature
            block += gumbel(params.seed, step, ids)
            row = int(np.argmax(block))
            if block[row] > best_score:
                best, best_score = start + row, float(block[row])
        return np.array([best])


def _best(values: F32, want: int, first: int) -> Ids:
    """The `want` greatest values as rows, greatest first, ties to the lower row; `first` is the very first."""
    if want == 1:
        return np.array([first])
    if want == 0:
        return np.zeros(0, np.int64)
    rows = np.arange(len(values))
    if want < len(values):
        threshold = np.partition(values, len(values) - want)[len(values) - want]
        rows = np.flatnonzero(values >= threshold)
    return rows[np.argsort(-values[rows], kind="stable")[:want]]


def _log_sums_exp(values: F32 | F64, starts: Ids, temperature: float = 1.0) -> F64:
    """Log-sum-exp of ``values / temperature`` for each stretch that begins at one of `starts`."""
    peaks = np.maximum.reduceat(values, starts).astype(np.float64)
    peaks[peaks == -np.inf] = 0
    exponents = values.astype(np.float64)
    exponents -= np.repeat(peaks, np.diff(starts, append=len(values)))
    exponents /= temperature
    sums = np.add.reduceat(np.exp(exponents, out=exponents), starts)
    with np.errstate(divide="ignore"):
        return peaks / temperature + np.log(sums)


_WHOLE = np.zeros(1, np.int64)


def _log_sum_exp(values: F64) -> float:
    return float(_log_sums_exp(values, _WHOLE)[0]) if len(values) else -np.inf


# ---------------------------------------------------------------- between ranks

_HEADER = struct.Struct("<IIIIIIq")
_NONE = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)
_NO_MASSES = np.zeros(0, np.float64)


class _Summary(NamedTuple):
    """One rank's slice as the leader sees it. Little-endian: the header, then the arrays in this order."""

    offset: int
    rows: int = 0
    invalid: int = -1
    """A token whose logit is NaN or +inf; -1: none."""
    log_masses: F64 = _NO_MASSES
    """Log-sum-exp of the adjusted logits over the temperature, of each block, if top-p needs it."""
    raw_log_masses: F64 = _NO_MASSES
    """Log-sum-exp of the raw logits, of each block, if log-probabilities were asked for."""
    ids: Ids = _NONE
    """Candidates, best first."""
    logits: F32 = _NO_VALUES
    """Their adjusted logits."""
    raw: F32 = _NO_VALUES
    """Their raw logits."""
    top_ids: Ids = _NONE
    """Tokens with the greatest raw logits, best first."""
    top_raw: F32 = _NO_VALUES

    @property
    def exhausted(self) -> bool:
        return len(self.ids) == self.rows

    def encode(self) -> bytes:
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
        return header + b"".join(array.astype(kind).tobytes() for array, kind in arrays)

    @classmethod
    def decode(cls, data: bytes) -> _Summary:
        if len(data) < _HEADER.size:
            raise SummaryError(f"a summary of {len(data)} bytes is shorter than its header")
        offset, rows, count, top_count, blocks, raw_blocks, invalid = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 8 * (blocks + raw_blocks) + 12 * count + 8 * top_count:
            raise SummaryError(f"a summary of {len(data)} bytes for {count} candidates and {top_count} tops")
        masses = np.frombuffer(data, "<f8", blocks + raw_blocks, _HEADER.size)
        words = np.frombuffer(data, "<u4", offset=_HEADER.size + masses.nbytes)
        ids, logits, raw, top_ids, top_raw = np.split(words, [count, 2 * count, 3 * count, 3 * count + top_count])
        return cls(
            offset,
            rows,
            invalid,
            masses[:blocks],
            masses[blocks:],
            ids.astype(np.int64),
            logits.view("<f4"),
            raw.view("<f4"),
            top_ids.astype(np.int64),
            top_raw.view("<f4"),
        )


# ---------------------------------------------------------------- the leader

_SLACK = 1e-9
"""Off the mass that top-p asks for. Sums are rounded (by about 1e-15); with this, a natural boundary such as two of
four equal tokens at top_p = 0.5 is not decided by it."""


def choose(summaries: Sequence[bytes], params: SamplingParams, step: int) -> Choice | NeedMore:
    """Choose the token of this step.

    Args:
        summaries: of every rank, by rank.
        step: the same as the ranks were given.

    Raises:
        LogitsError: a rank computed NaN or +inf, or every logit is -inf.
        SummaryError: a summary is malformed, or they do not tile the vocabulary.
    """
    shards = [_Summary.decode(data) for data in summaries]
    _check(shards)
    ids = np.concatenate([shard.ids for shard in shards])
    logits = np.concatenate([shard.logits for shard in shards]).astype(np.float64)
    order = np.lexsort((ids, -logits))
    ids, logits = ids[order], logits[order]
    if not len(ids) or logits[0] == -np.inf:
        raise LogitsError("every logit is -inf: no token can be chosen; check logit_bias and the weights")

    winner = 0
    if not params.greedy:
        scaled = logits / params.temperature
        if params.truncated:
            certain = _certain(shards, order)
            complete = all(shard.exhausted for shard in shards)
            log_mass = _log_sum_exp(np.concatenate([shard.log_masses for shard in shards]))
            allowed = _allowed(scaled[:certain], complete, log_mass, params)
            if allowed is None:
                return NeedMore(8 * max(len(shard.ids) for shard in shards if not shard.exhausted))
            scaled = scaled[:allowed]
        winner = int(np.argmax(scaled + gumbel(params.seed, step, ids[: len(scaled)])))
    token = int(ids[winner])
    if not params.logprobs:
        return Choice(token)

    total = _log_sum_exp(np.concatenate([shard.raw_log_masses for shard in shards]))
    raw = np.concatenate([shard.raw for shard in shards])[order[winner]]
    top_ids = np.concatenate([shard.top_ids for shard in shards])
    top_raw = np.concatenate([shard.top_raw for shard in shards])
    best = np.lexsort((top_ids, -top_raw))[: params.top_logprobs]
    top = tuple((int(top_ids[i]), float(top_raw[i]) - total) for i in best if top_raw[i] > -np.inf)
    return Choice(token, float(raw) - total, top)


def _check(shards: Sequence[_Summary]) -> None:
    end = 0
    for rank, shard in enumerate(shards):
        if shard.rows and shard.offset != end:
            raise SummaryError(f"rank {rank} summarised rows from {shard.offset} on, but the next row is {end}")
        end += shard.rows
        if shard.invalid >= 0:
            raise LogitsError(
                f"rank {rank} computed a logit that is NaN or infinite (token {shard.invalid}): "
                "its weights or its engine are broken"
            )


def _certain(shards: Sequence[_Summary], order: Ids) -> int:
    """How many of the gathered candidates, in order, are certainly the best of the whole vocabulary.

    What a rank did not report comes after its last candidate, so nothing is missing before the first such one.
    """
    ends = np.cumsum([len(shard.ids) for shard in shards])
    last = [end - 1 for end, shard in zip(ends, shards, strict=True) if not shard.exhausted]
    return int(np.isin(order, last).argmax()) + 1 if last else len(order)


def _allowed(scaled: F64, complete: bool, log_mass: float, params: SamplingParams) -> int | None:
    """How many of the best tokens pass top-k, top-p and min-p; None if that is not certain yet.

    Args:
        scaled: logits over the temperature of the certainly best tokens, in order.
        complete: these are the whole vocabulary.
        log_mass: log-sum-exp of `scaled` over the whole vocabulary, if top-p is set and top-k is not.
    """
    if params.top_k:
        if len(scaled) < params.top_k and not complete:
            return None
        scaled, complete = scaled[: params.top_k], True
        log_mass = _log_sum_exp(scaled)
    limits = [len(scaled)] if complete else []
    if params.top_p < 1:
        reached = np.cumsum(np.exp(scaled - log_mass)) >= params.top_p - _SLACK
        if reached.any():
            limits.append(int(reached.argmax()) + 1)
    if params.min_p > 0:
        passing = int(np.count_nonzero(scaled >= scaled[0] + log(params.min_p)))
        if passing < len(scaled):
            limits.append(passing)
    return min(limits, default=None)
