"""The scheduler's part in sampling: the token of a step, from the summaries of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np

from motley.daemon.sampling.masses import log_sum_exp
from motley.daemon.sampling.noise import F64, Ids, gumbel, noise_of
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.summary import Summary, SummaryError

_SLACK = 1e-9
"""What is taken off the mass that top-p asks for, so that a natural boundary, such as two of four equal tokens at
top_p = 0.5, is not decided by how sums are rounded (by about 1e-15)."""


_NOTHING = "every logit is -inf: no token can be chosen; check logit_bias and the weights"


class LogitsError(ArithmeticError):
    """There is nothing to choose from: logits are NaN or +inf (a rank computed wrongly), or all of them -inf."""


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


def choose(summaries: Sequence[bytes], params: SamplingParams, step: int) -> Choice | NeedMore:
    """Choose the next token of a sequence.

    Args:
        summaries: of every rank, by rank, as `motley.daemon.sampling.shard.ShardSampler.summarise` makes them.
        step: tokens generated before this one, as the ranks were told.

    Raises:
        LogitsError: a rank computed NaN or +inf, or every logit is -inf.
        SummaryError: a summary is malformed, or they do not tile the vocabulary.
    """
    shards = [Summary.decode(data) for data in summaries]
    _check(shards)
    if (params.greedy or not params.truncated) and not params.logprobs:
        return _best_of_one_each(shards, params, step)
    ids = np.concatenate([shard.ids for shard in shards])
    logits = np.concatenate([shard.logits for shard in shards]).astype(np.float64)
    order = np.lexsort((ids, -logits))
    ids, logits = ids[order], logits[order]
    if not len(ids) or logits[0] == -np.inf:
        raise LogitsError(_NOTHING)

    winner = 0
    if not params.greedy:
        scaled = logits / params.temperature
        if params.truncated:
            certain = _certain(shards, order)
            complete = all(shard.exhausted for shard in shards)
            log_mass = log_sum_exp(np.concatenate([shard.log_masses for shard in shards]))
            allowed = _allowed(scaled[:certain], complete, log_mass, params)
            if allowed is None:
                return NeedMore(8 * max(len(shard.ids) for shard in shards if not shard.exhausted))
            scaled = scaled[:allowed]
        winner = int(np.argmax(scaled + gumbel(params.seed, step, ids[: len(scaled)])))
    token = int(ids[winner])
    if not params.logprobs:
        return Choice(token)

    total = log_sum_exp(np.concatenate([shard.raw_log_masses for shard in shards]))
    raw = np.concatenate([shard.raw for shard in shards])[order[winner]]
    top_ids = np.concatenate([shard.top_ids for shard in shards])
    top_raw = np.concatenate([shard.top_raw for shard in shards])
    best = np.lexsort((top_ids, -top_raw))[: params.top_logprobs]
    top = tuple((int(top_ids[i]), float(top_raw[i]) - total) for i in best if top_raw[i] > -np.inf)
    return Choice(token, float(raw) - total, top)


def _best_of_one_each(shards: Sequence[Summary], params: SamplingParams, step: int) -> Choice:
    """The choice where each rank has told the one token that its slice chooses; errors as `choose`."""
    candidates = [(shard.logits.item(), shard.ids.item()) for shard in shards if len(shard.ids)]
    if max(candidates, default=(-inf, 0))[0] == -inf:
        raise LogitsError(_NOTHING)
    if not params.greedy and len(candidates) > 1:
        candidates = [
            (logit / params.temperature + noise_of(params.seed, step, token), token) for logit, token in candidates
        ]
    return Choice(max(candidates, key=lambda each: (each[0], -each[1]))[1])


def _check(shards: Sequence[Summary]) -> None:
    """Make sure that the slices follow each other and that no rank has computed nonsense; errors as `choose`."""
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


def _certain(shards: Sequence[Summary], order: Ids) -> int:
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
        log_mass = log_sum_exp(scaled)
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
