"""One rank's part in sampling one sequence: penalties, candidates and sums of its own slice of the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from motley.daemon.sampling.masses import log_sums_exp
from motley.daemon.sampling.noise import F64, Ids, gumbel, noise_of, state_of
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.summary import Summary
from motley.plugins.engine import F32
from motley.plugins.native.sampling import contenders

_MANY = 1024
"""More contenders for a draw than these are not scored: the best score among a few of them excludes most others."""
_GROUP = 256
"""Rows whose greatest value stands for them: where so many of these reach a threshold, as many rows do."""


class ShardSampler:
    """Samples one sequence as far as one rank can: it knows the logits of its own slice of the vocabulary.

    Args:
        params: of the request.
        offset: the token id of this rank's first vocabulary row.
        size: V_r, the rows of this rank's slice; may be 0.
        prompt: all token ids of the prompt, whichever slice they are in.
        block: tokens whose masses are summed first, counted from token 0; the same on all ranks.
    """

    def __init__(self, params: SamplingParams, offset: int, size: int, prompt: npt.ArrayLike, block: int) -> None:
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
        rows = np.unique(np.asarray(prompt if self._penalised else [], np.int64)) - offset
        self._seen = rows[(rows >= 0) & (rows < size)]
        """Rows of this slice whose token is in the prompt or the output so far, if there are penalties for them."""
        self._counts = np.zeros(len(self._seen), np.float32)
        """How often each of those was generated."""
        self._prompted = len(self._seen)
        """Of these rows, those in the prompt."""
        self._answer: list[int] = []
        """The generated tokens, if there are penalties for them."""
        self._counted = 0
        """How many of these are counted."""

    def accept(self, step: int, token: int) -> None:
        """Say which token was generated, or guessed, after `step` others.

        Every rank must accept every token. What was said of this step and later ones before no longer holds.
        """
        if not self._penalised or self._answer[step : step + 1] == [token]:
            return
        self._count(min(step, self._counted))
        self._answer[step:] = [token]

    def _count(self, step: int) -> None:
        """Count the first `step` generated tokens, and no others."""
        while self._counted < step:
            self._add(self._answer[self._counted] - self._offset)
            self._counted += 1
        while self._counted > step:
            self._counted -= 1
            self._remove(self._answer[self._counted] - self._offset)

    def _add(self, row: int) -> None:
        if not 0 <= row < self._size:
            return
        known = np.flatnonzero(self._seen == row)
        if len(known):
            self._counts[known[0]] += 1
        else:
            self._seen = np.append(self._seen, row)
            self._counts = np.append(self._counts, np.float32(1))

    def _remove(self, row: int) -> None:
        if not 0 <= row < self._size:
            return
        (known,) = np.flatnonzero(self._seen == row)
        self._counts[known] -= 1
        if known >= self._prompted and not self._counts[known]:  # the last one: rows are added as they are generated
            self._seen, self._counts = self._seen[:-1], self._counts[:-1]

    def summarise(self, logits: F32, step: int, want: int, allowed: npt.NDArray[np.bool_] | None = None) -> bytes:
        """Say what `motley.daemon.sampling.choice.choose` must know of this slice, as bytes.

        Args:
            logits: f32[V_r]{tp}, raw; not changed.
            step: tokens generated before this one; all of them have been accepted.
            want: how many candidates to report; all that may be chosen if there are no more than that.
            allowed: bool[V_r]{tp}, which tokens may be chosen; None: all.
        """
        if logits.shape != (self._size,):
            raise ValueError(f"logits of shape {logits.shape} for a slice of {self._size} rows")
        params = self._params
        if self._penalised:
            self._count(step)
        if not self._size:
            return Summary(offset=self._offset).encode()
        adjusted = self._adjust(logits)
        first = int(np.argmax(adjusted))  # a NaN, if there is one
        if not adjusted[first] < np.inf:
            return Summary(offset=self._offset, rows=self._size, invalid=self._offset + first).encode()
        if allowed is not None:
            adjusted = np.where(allowed, adjusted, np.float32(-np.inf))
            first = int(np.argmax(adjusted))

        if params.greedy or params.truncated:
            rows = _best(adjusted, 1 if params.greedy else want, first)
        else:
            rows = self._noisiest(adjusted, step, first)
        summary = Summary(
            offset=self._offset,
            rows=self._size,
            ids=rows + self._offset,
            logits=adjusted[rows],
            raw=logits[rows],
        )
        if params.top_p < 1 and not params.top_k and not params.greedy:
            summary = summary._replace(log_masses=log_sums_exp(adjusted, self._blocks, params.temperature))
        if params.logprobs:
            top = _best(logits, params.top_logprobs, int(np.argmax(logits)))
            summary = summary._replace(
                raw_log_masses=log_sums_exp(logits, self._blocks), top_ids=top + self._offset, top_raw=logits[top]
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

    def _noisiest(self, adjusted: F32, step: int, first: int) -> Ids:
        """The one row that wins the Gumbel-max draw of this slice; `first` has the greatest logit."""
        seed, temperature = self._params.seed, self._params.temperature

        def scores(rows: Ids) -> F64:
            return adjusted[rows] / np.float64(temperature) + gumbel(seed, step, rows + self._offset)

        if adjusted[first] == -np.inf:
            return np.array([first])
        state = state_of(seed, step, self._offset)
        rows = contenders(adjusted, temperature, self._score(adjusted, first, step), state)
        if len(rows) > _MANY:  # the logits are much the same: the noise decides
            rows = contenders(adjusted, temperature, float(scores(rows[: _MANY // 4]).max()), state)
        return rows[[np.argmax(scores(rows))]] if len(rows) > 1 else rows

    def _score(self, adjusted: F32, row: int, step: int) -> float:
        """Of one row in a draw."""
        noise = noise_of(self._params.seed, step, row + self._offset)
        return float(adjusted[row]) / self._params.temperature + noise


def _best(values: F32, want: int, first: int) -> Ids:
    """The `want` greatest values as rows, greatest first, ties to the lower row; `first` is the very first."""
    if want == 1:
        return np.array([first])
    if want == 0:
        return np.zeros(0, np.int64)
    threshold = _reached(values, want) if want < len(values) else np.float32(-np.inf)
    rows = np.flatnonzero(values >= threshold)
    if threshold == -np.inf and want < len(values):  # fewer may be chosen; one that may not says so
        rows = np.append(np.flatnonzero(values > threshold), np.argmin(values))
    return rows[np.argsort(-values[rows], kind="stable")[:want]]


def _reached(values: F32, want: int) -> np.float32:
    """A value that at least `want` of the values reach, and usually few more; `want` is less than they are."""
    groups = len(values) // _GROUP
    if groups > 4 * want:
        peaks = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        threshold: np.float32 = np.partition(peaks, groups - want)[groups - want]
        if threshold > -np.inf:
            return threshold
    exact: np.float32 = np.partition(values, len(values) - want)[len(values) - want]
    return exact
