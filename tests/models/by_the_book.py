"""What a described model computes, on whole weights in float64: written from what the operations say, for comparison.

Nothing is cut, cached or fused, so sums over ranks change nothing. Where a loop is plainer than an array, it is a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.daemon.models.cutting.states import reach
from motley.daemon.models.description.axes import Value, W
from motley.daemon.models.description.hashed_rows import with_those_before
from motley.daemon.models.description.model import EMBEDDED, Model
from motley.daemon.models.description.operations import Operation
from motley.daemon.models.description.operations.attention import Attend, Choose
from motley.daemon.models.description.operations.experts import Experts, Route, Routing
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    HeadParts,
    ShortConvolution,
    StateSpace,
)
from motley.daemon.models.description.operations.rows import (
    Activation,
    Add,
    AsLarge,
    Clip,
    Gated,
    HeadLinear,
    Join,
    Linear,
    Norm,
    Scale,
    ScaleRows,
    SideBySide,
    SoftCap,
    StatisticalTopK,
    Sum,
    Times,
    WholeNorm,
    Xielu,
)
from motley.daemon.models.description.operations.streams import (
    MatchStreams,
    ReadStreams,
    StreamGates,
    WriteStreams,
)
from motley.daemon.models.description.rope import rotary_tables
from motley.daemon.weights.places import numbered

F64 = npt.NDArray[np.float64]
Values = dict[str, npt.NDArray[Any]]


def logits_by_the_book(model: Model, weights: Mapping[str, npt.NDArray[Any]], tokens: Sequence[int]) -> F64:
    """f64[T, V]: the logits after each of some tokens, which are one prompt."""
    book = _Book(model, {name: each.astype(np.float64) for name, each in weights.items()})
    rows = book.weights[model.embedding.name][tokens] * model.embedding_scale
    values: Values = {EMBEDDED: rows}
    if model.beside is not None:
        given = [layer.given for layer in model.layers if layer.given]
        there = [token if token < model.beside.out.size else 0 for token in tokens]
        parts = np.split(book.weights[model.beside.name][there], len(given), axis=1)
        values |= dict(zip((each.name for each in given), parts, strict=True))
    before = with_those_before(np.array(tokens, np.int32), 0, len(tokens), model.recent)
    for own, layer in zip(model.hashed, (each for each in model.layers if each.given), strict=False):
        assert layer.given is not None
        table = np.concatenate([book.weights[part.name] for part in own.parts])
        values[layer.given.name] = table[own.numbers(before)].reshape(len(tokens), -1)
    for layer in model.layers:
        values[layer.x.name] = rows
        rows = book.run(layer.operations, values, layer.y)
    return book.run(model.head, {model.head_x.name: rows}, model.logits)


def layer_by_the_book(model: Model, number: int, weights: Mapping[str, npt.NDArray[Any]], rows: F64) -> F64:
    """f64[T, D]: what a layer makes of residuals f64[T, D], by the weights that it has."""
    layer = model.layers[number]
    book = _Book(model, {name: each.astype(np.float64) for name, each in weights.items()})
    return book.run(layer.operations, {layer.x.name: rows}, layer.y)


class _Book:
    def __init__(self, model: Model, weights: Mapping[str, F64]) -> None:
        self.model = model
        self.weights = weights

    def run(self, operations: Iterable[Operation], values: Values, result: Value, expert: int | None = None) -> F64:
        """The value of `result` after some operations; `expert` is the number of the one whose they are."""
        for each in operations:
            self._compute(each, values, expert)
        return values[result.name]

    def _compute(self, operation: Operation, values: Values, expert: int | None) -> None:
        match operation:
            case Norm(x, y, gain, epsilon, offset, centred):
                rows = values[x.name]
                width = x.axis.heads.size if x.axis.heads else x.axis.size
                apart = rows.reshape(len(rows), -1, width)
                if centred:
                    apart = apart - apart.mean(axis=-1, keepdims=True)
                scale = 1.0 if gain is None else self.weights[gain.name] + offset
                if gain is not None and gain.out == x.axis:
                    scale = (self.weights[gain.name] + offset).reshape(apart.shape[1:])
                bias = self.weights[gain.bias] if gain is not None and gain.bias else 0.0
                values[y.name] = (_normed(apart, epsilon) * scale + bias).reshape(rows.shape)
            case WholeNorm(xs=xs, ys=ys, gains=gains, epsilon=epsilon):
                for x, y, gain in zip(xs, ys, gains, strict=True):
                    values[y.name] = _normed(values[x.name], epsilon) * self.weights[gain.name]
            case StatisticalTopK(x=x, y=y, deviations=deviations):
                rows = values[x.name]
                threshold = rows.mean(axis=1, keepdims=True) + deviations * rows.std(axis=1, keepdims=True)
                values[y.name] = np.maximum(rows - threshold, 0.0)
            case AsLarge(x, of, y, least):
                (own, other) = (np.mean(values[each.name] ** 2, axis=1, keepdims=True) for each in (x, of))
                values[y.name] = values[x.name] * np.sqrt(other / np.maximum(own, least))
            case Linear(x=x, ws=ws, ys=ys):
                for w, y in zip(ws, ys, strict=True):
                    product = values[x.name] @ self.weights[numbered(w.name, expert)].T
                    values[y.name] = product + (self.weights[numbered(w.bias, expert)] if w.bias else 0.0)
            case HeadLinear(x=x, y=y):
                values[y.name] = self._of_heads(operation, values[x.name])
            case Join(xs, y, first):
                apart = [values[x.name].reshape(len(values[x.name]), -1, _size(x)) for x in xs]
                apart[0] = apart[0][..., first:]
                values[y.name] = np.concatenate(apart, axis=2).reshape(len(apart[0]), -1)
            case SideBySide(xs, y):
                values[y.name] = np.concatenate([values[x.name] for x in xs], axis=1)
            case StreamGates():
                values[operation.y.name] = self._stream_gates(operation, values[operation.logits.name])
            case ReadStreams(x, gates, y):
                streams = _streams(values[x.name], y.axis.size)
                shares = values[gates.name] if isinstance(gates, Value) else np.array(gates)
                values[y.name] = sum(shares[..., n, None] * stream for n, stream in enumerate(streams))
            case WriteStreams(x, gates, rows, y):
                streams = _streams(values[x.name], rows.axis.size)
                count, mixed = len(streams), streams
                same = np.tile([0.0] * count + [*gates] if isinstance(gates, tuple) else [], (len(values[x.name]), 1))
                shares = values[gates.name] if isinstance(gates, Value) else same
                if shares.shape[1] > 2 * count:
                    mixed = [
                        sum(shares[:, 2 * count + j * count + k, None] * stream for j, stream in enumerate(streams))
                        for k in range(count)
                    ]
                made = [each + shares[:, count + k, None] * values[rows.name] for k, each in enumerate(mixed)]
                values[y.name] = np.concatenate(made, axis=1)
            case MatchStreams(queries, keys, rows, y):
                fits = [
                    (one * other).sum(axis=1) / np.sqrt(rows.axis.size)
                    for one, other in zip(
                        _streams(values[queries.name], rows.axis.size),
                        _streams(values[keys.name], rows.axis.size),
                        strict=True,
                    )
                ]
                shares = [_sigmoid(np.sign(fit) * np.sqrt(np.maximum(np.abs(fit), 1e-6))) for fit in fits]
                values[y.name] = np.concatenate([share[:, None] * values[rows.name] for share in shares], axis=1)
            case Clip(x, y, low, high):
                values[y.name] = np.minimum(np.maximum(values[x.name], low), high)
            case HeadParts(x, ys):
                assert x.axis.heads is not None
                apart = values[x.name].reshape(len(values[x.name]), -1, x.axis.heads.size)
                at = 0
                for y in ys:
                    size = y.axis.size // apart.shape[1]
                    values[y.name] = apart[:, :, at : at + size].reshape(len(apart), -1)
                    at += size
            case DeltaRule():
                values[operation.y.name] = self._delta_rule(operation, values)
            case StateSpace():
                values[operation.y.name] = self._state_space(operation, values)
            case ShortConvolution(b=b, c=c, x=x, y=y, filter=own):
                convolved = self._convolved(values[b.name] * values[x.name], own, operation.filter_bias)
                values[y.name] = values[c.name] * convolved
            case DilatedConvolution(x=x, y=y, filter=own, dilation=dilation):
                convolved = self._convolved(values[x.name], own, dilation=dilation)
                values[y.name] = convolved * _sigmoid(convolved)
            case Choose():
                values[operation.y.name] = self._choose(operation, values)
            case Attend():
                values[operation.y.name] = self._attend(operation, values)
            case Gated(gate, up, y, activation, limits):
                opened, other = values[gate.name], values[up.name] if up else np.array(1.0)
                if limits:
                    opened, other = np.minimum(opened, limits[0]), np.clip(other, -limits[1], limits[1])
                values[y.name] = _gated(opened, other, activation)
            case Xielu(x, y, bend, fall):
                a, b = (np.log1p(np.exp(self.weights[w.name])) for w in (bend, fall))
                rows = values[x.name]
                values[y.name] = rows / 2 + np.where(rows > 0, a * rows**2, (0.5 + b) * (np.expm1(rows) - rows))
            case Sum(xs, y):
                values[y.name] = sum((values[x.name] for x in xs[1:]), values[xs[0].name])
            case Scale(x, y, by):
                values[y.name] = values[x.name] * by
            case Times(x, w, y):
                values[y.name] = values[x.name] * self.weights[w.name]
            case ScaleRows(x, by, y, opened):
                values[y.name] = values[x.name] * (_sigmoid(values[by.name]) if opened else values[by.name])
            case SoftCap(x, y, cap):
                values[y.name] = cap * np.tanh(values[x.name] / cap)
            case Add(residual, x, y):
                values[y.name] = values[residual.name] + values[x.name]
            case Route():
                correction = operation.routing.correction
                more = 0.0 if correction is None else self.weights[correction.name]
                rows = values[operation.logits.name]
                if operation.kept is not None:
                    three = [_routed_or_kept(row, operation.routing, more) for row in rows]
                    values[operation.kept.name] = np.array([[kept] for _, _, kept in three])
                    routed = [(weights, chosen) for weights, chosen, _ in three]
                else:
                    routed = [_routed(row, operation.routing, more) for row in rows]
                chosen = values[operation.chosen.name] = np.array([chosen for _, chosen in routed])
                gains = operation.routing.gains
                by = 1.0 if gains is None else self.weights[gains.name][chosen]
                values[operation.weights.name] = np.array([weights for weights, _ in routed]) * by
            case Experts():
                values[operation.y.name] = self._experts(operation, values)

    def _experts(self, experts: Experts, values: Values) -> F64:
        rows = values[experts.x.name]
        total = np.zeros_like(rows) if experts.base is None else values[experts.base.name].copy()
        weights, chosen = values[experts.weights.name], values[experts.chosen.name]
        for number, row in enumerate(rows):
            for weight, expert in zip(weights[number], chosen[number], strict=True):
                before, after = (weight, 1) if experts.scales_inputs else (1, weight)
                x = {experts.body_x.name: before * row[None]}
                total[number] += after * self.run(experts.body, x, experts.body_y, int(expert))[0]
        return total

    def _of_heads(self, linear: HeadLinear, x: F64) -> F64:
        matrices = self.weights[linear.w.name].reshape(-1, _size(linear.y), linear.w.shape[1])
        heads = x.reshape(len(x), len(matrices), -1)[..., linear.first : linear.first + linear.w.shape[1]]
        return np.concatenate([heads[:, number] @ matrix.T for number, matrix in enumerate(matrices)], axis=1)

    def _choose(self, choose: Choose, values: Values) -> npt.NDArray[Any]:
        """i64[T, lists, count]: the best positions of each row, or for each KV head of it, -1 where it has fewer."""
        q, k = self._rotated(values[choose.q.name], choose), values[choose.k.name]
        pools, heads = choose.pooling is not None or choose.means is not None, choose.heads.queries
        lists = heads if choose.weights is None and choose.means is None else 1
        count = choose.y.axis.heads.size if choose.y.axis.heads else choose.y.axis.size
        chosen = np.full((len(q), lists, count), -1)
        k = self._pooled(k, choose) if pools else self._rotated(k, choose)
        for row in range(len(q)):
            scores = q[row].reshape(heads, -1) @ k[: (row + 1) // choose.block if pools else row + 1].T
            if choose.weights is not None:
                scores = values[choose.weights.name][row][None] @ np.maximum(scores, 0)
            if choose.means is not None:
                scores = np.maximum(scores, 0).sum(axis=0)[None]
            for own, of_list in zip(scores, chosen[row], strict=True):
                if not pools:
                    starts = range(0, row + 1, choose.block)
                    own = np.array([own[start : start + choose.block].max() for start in starts])
                    own[max(0, len(starts) - choose.latest) :] = np.inf
                best = np.argsort(-own, kind="stable")[: len(of_list) // choose.block]
                seen = [at for block in best for at in range(row + 1)[block * choose.block :][: choose.block]]
                seen += range(len(own) * choose.block, row + 1)
                of_list[: len(seen)] = seen
        return chosen

    def _pooled(self, k: F64, choose: Choose) -> F64:
        """The keys of whole blocks, of those of rows, perhaps with their gates behind them."""
        whole = len(k) - len(k) % choose.block
        if (means := choose.means) is not None:
            k = k[:whole].reshape(-1, choose.block, k.shape[1]).mean(axis=1)
            normed = _normed(k, means.epsilon) * (self.weights[means.gain.name] + means.offset)
            return self._rotated(normed, choose, choose.block)
        assert choose.pooling is not None
        keys, gates = np.split(k[:whole].reshape(-1, choose.block, k.shape[1]), 2, axis=2)
        odds = np.exp(gates + self.weights[choose.pooling.name])
        return (odds * keys).sum(axis=1) / odds.sum(axis=1)

    def _attend(self, attend: Attend, values: Values) -> F64:
        q, k, v = (values[(each or attend.k).name] for each in (attend.q, attend.k, attend.v))
        size, group = attend.heads.size, attend.heads.group
        count = len(q)
        q, k = self._rotated(q, attend), self._rotated(k, attend)
        if attend.gains is not None:
            gains = (self.weights[gain.name] for gain in attend.gains)
            q, k = (rows * np.tile(gain, rows.shape[1] // size) for rows, gain in zip((q, k), gains, strict=True))
        v = k if attend.v is None else v
        y = np.zeros_like(q)
        for head in range(attend.heads.queries):
            own, read = (slice(number * size, (number + 1) * size) for number in (head, head // group))
            sink = [] if attend.sinks is None else [self.weights[attend.sinks.name][head]]
            for row in range(count):
                first = max(0, row - attend.window + 1) if attend.window else 0
                if attend.chunked:
                    first = row // attend.window * attend.window
                scores = k[first : row + 1, read] @ q[row, own] * attend.scale
                if (warmth := attend.warmth) is not None:
                    scores *= 1 + warmth.growth * np.log(1 + (row + warmth.offset) // warmth.span)
                if attend.soft_cap:
                    scores = attend.soft_cap * np.tanh(scores / attend.soft_cap)
                if attend.chosen is not None:
                    positions = np.arange(first, row + 1)
                    lists = values[attend.chosen.name][row]
                    scores[~np.isin(positions, lists[head // group if len(lists) > 1 else 0])] = -np.inf
                odds = _softmax(np.array([*scores, *sink]))
                y[row, own] = odds[: len(scores)] @ v[first : row + 1, read]
        return y

    def _stream_gates(self, gates: StreamGates, logits: F64) -> F64:
        count, scale, base = gates.streams, self.weights[gates.scale.name], self.weights[gates.base.name]
        made = np.zeros_like(logits)
        for row, own in enumerate(logits):
            made[row, :count] = _sigmoid(own[:count] * scale[0] + base[:count]) + gates.epsilon
            if len(scale) > 1:
                part = slice(count, 2 * count)
                made[row, part] = gates.written * _sigmoid(own[part] * scale[1] + base[part]) + gates.least
            if len(scale) > 2:
                part = slice(2 * count, None)
                raw = (own[part] * scale[2] + base[part]).reshape(count, count)
                mix = np.stack([_softmax(each) for each in raw]) + gates.epsilon
                mix /= mix.sum(axis=0) + gates.epsilon
                for _ in range(gates.rounds - 1):
                    mix /= mix.sum(axis=1)[:, None] + gates.epsilon
                    mix /= mix.sum(axis=0) + gates.epsilon
                made[row, part] = mix.ravel()
        return made

    def _convolved(self, rows: F64, own: W, bias: W | None = None, dilation: int = 1) -> F64:
        """Sums over a row and those before it, by taps, which are so many rows apart."""
        taps, seen = self.weights[own.name], reach(own)
        whole = np.zeros_like(rows) + (self.weights[bias.name] if bias else 0.0)
        for row in range(len(rows)):
            for back in range(min(row // dilation + 1, seen)):
                whole[row] += taps[:, seen - 1 - back] * rows[row - back * dilation]
        return whole

    def _state_space(self, space: StateSpace, values: Values) -> F64:
        of, biases = space.heads, space.filter_biases or (None, None, None)
        convolved = [
            self._convolved(values[value.name], w, bias)
            for value, w, bias in zip((space.x, space.b, space.c), space.filters, biases, strict=True)
        ]
        xs, bs, cs = (each * _sigmoid(each) for each in convolved)
        z, dt = values[space.z.name], values[space.dt.name]
        decay, bias, skip = (self.weights[each.name] for each in (space.decay, space.bias, space.skip))
        y = np.zeros_like(xs)
        for head in range(of.values):
            key = slice(0, of.key_size) if of.shared else _part(head // of.group, of.key_size)
            own, state = _part(head, of.value_size), np.zeros((of.key_size, of.value_size))
            for row in range(len(y)):
                step = min(max(np.log1p(np.exp(dt[row, head] + bias[head])), space.limits[0]), space.limits[1])
                state *= np.exp(-np.exp(decay[head]) * step)
                state += np.outer(bs[row, key], xs[row, own]) * step
                gate = z[row, own] * _sigmoid(z[row, own])
                y[row, own] = (cs[row, key] @ state + skip[head] * xs[row, own]) * gate
        return y

    def _delta_rule(self, delta: DeltaRule, values: Values) -> F64:
        of = delta.heads
        convolved = [
            self._convolved(values[value.name], w)
            for value, w in zip((delta.q, delta.k, delta.v), delta.filters, strict=True)
        ]
        mixed = [each * _sigmoid(each) for each in convolved]
        z, b, a = (values[each.name] for each in (delta.z, delta.b, delta.a))
        decay, bias, gain = (self.weights[each.name] for each in (delta.decay, delta.bias, delta.gain))
        y = np.zeros_like(mixed[2])
        for head in range(of.values):
            key, own = (
                slice(at * size, (at + 1) * size)
                for at, size in ((head // of.group, of.key_size), (head, of.value_size))
            )
            state = np.zeros((of.key_size, of.value_size))
            for row in range(len(y)):
                q, k = (each[row, key] / np.sqrt((each[row, key] ** 2).sum() + 1e-6) for each in mixed[:2])
                speeds = slice(head * delta.decays, (head + 1) * delta.decays)
                rate, speed = np.exp(decay[head]), a[row, speeds] + bias[speeds]
                usual = -rate * np.log1p(np.exp(speed))
                state *= np.exp(delta.floor * _sigmoid(rate * speed) if delta.floor else usual)[:, None]
                share = delta.written * _sigmoid(b[row, head])
                state += np.outer(k, (mixed[2][row, own] - k @ state) * share)
                found = q @ state / np.sqrt(of.key_size)
                gate = _sigmoid(z[row, own]) * (1 if delta.squashed else z[row, own])
                y[row, own] = _normed(found, delta.epsilon) * gain * gate
        return y

    def _rotated(self, rows: F64, attend: Attend | Choose, apart: int = 1) -> F64:
        """Heads whose first elements are turned in pairs: of the first half of these and of the second. The rows are so
        many positions apart."""
        if attend.rope is None:
            return rows
        rope, count = self.model.ropes[attend.rope], len(rows) * apart
        cosines, sines = (table[::apart].astype(np.float64) for table in rotary_tables(rope, count, count))
        turned = rows.copy()
        half = rope.size // 2
        for start in range(0, rows.shape[1], attend.heads.size):
            one, other = (slice(start + at, start + at + half) for at in (0, half))
            turned[:, one] = rows[:, one] * cosines - rows[:, other] * sines
            turned[:, other] = rows[:, other] * cosines + rows[:, one] * sines
        return turned


def _size(heads: Value) -> int:
    """Elements of a head."""
    assert heads.axis.heads is not None
    return heads.axis.heads.size


def _streams(rows: F64, width: int) -> list[F64]:
    """Residual streams apart."""
    return [rows[:, start : start + width] for start in range(0, rows.shape[1], width)]


def _part(number: int, size: int) -> slice:
    """The elements of one of several equal parts."""
    return slice(number * size, (number + 1) * size)


def _normed(rows: F64, epsilon: float) -> F64:
    normed: F64 = rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + epsilon)
    return normed


def _sigmoid(x: F64) -> F64:
    result: F64 = 1 / (1 + np.exp(-x))
    return result


def _softmax(x: F64) -> F64:
    odds = np.exp(x - x.max())
    result: F64 = odds / odds.sum()
    return result


def _gated(gate: F64, up: F64 | float, activation: Activation) -> F64:
    match activation:
        case Activation.SILU:
            return gate * _sigmoid(gate) * up
        case Activation.GELU_TANH:
            result: F64 = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            return result
        case Activation.SIGMOID:
            return _sigmoid(gate) * up
        case Activation.SOFTPLUS:
            softened: F64 = np.logaddexp(0.0, gate) * up
            return softened
        case Activation.RELU:
            return np.maximum(gate, 0.0) * up
        case Activation.CLAMPED:
            gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
            return gate * _sigmoid(1.702 * gate) * (up + 1)


def _routed(logits: F64, rule: Routing, correction: F64 | float) -> tuple[list[float], list[int]]:
    """The weights of a row's experts, and which these are."""
    if rule.scores == "sparse mixer":
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:2]
        left, weights = list(range(len(logits))), np.zeros(2)
        for number, expert in enumerate(chosen):
            best = logits[expert]
            near = [one for one in left if (best - logits[one]) / max(abs(logits[one]), best) <= rule.tolerance]
            weights[number] = 1 / np.exp(logits[near] - best).sum()
            left.remove(expert)
    elif rule.scores == "softmax of chosen":
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[: rule.chosen]
        weights = _softmax(logits[chosen])
    elif rule.scores == "sigmoid of chosen":
        chosen = sorted(range(len(logits)), key=lambda expert: -(logits + correction)[expert])[: rule.chosen]
        weights = _sigmoid(logits[chosen])
    else:
        scores = _softmax(logits) if rule.scores == "softmax" else _sigmoid(logits)
        ranks = scores + correction
        each = len(ranks) // rule.groups
        groups = [range(start, start + each) for start in range(0, len(ranks), each)]
        best = sorted(groups, key=lambda own: -sum(sorted(ranks[own.start : own.stop])[-2:]))[: rule.groups_kept]
        allowed = [expert for own in best for expert in own]
        chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: rule.chosen]
        weights = scores[chosen]
    if rule.normalised:
        weights = weights / (weights.sum() + rule.epsilon)
    return list(weights * rule.scaling), chosen


def _routed_or_kept(logits: F64, rule: Routing, correction: F64 | float) -> tuple[list[float], list[int], float]:
    """The same where the last of those that a row chooses from are the row itself, and how much of that it keeps: in
    their place are experts that it has not chosen, which weigh nothing."""
    scores = _softmax(logits)
    ranks, experts = scores + correction, len(logits) - rule.identities
    chosen = sorted(range(len(logits)), key=lambda one: -ranks[one])[: rule.chosen]
    asked = [one for one in chosen if one < experts]
    others = [one for one in range(experts) if one not in asked][: rule.chosen - len(asked)]
    weights = [scores[one] * rule.scaling for one in asked] + [0.0] * len(others)
    return weights, asked + others, sum(scores[one] * rule.scaling for one in chosen if one >= experts)
