"""How a router's logits become the experts of a row and their weights, in standard ONNX operators.

Sources: mixtures with a softmax before the choice (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538) or after it
(gpt-oss), or among the logits near a chosen one (`motley.daemon.models.graph.sparse_mixer`); sigmoid scores with a
correction bias and groups (DeepSeek-V3, https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator

from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.graph.emitter import Emitter
from motley.daemon.models.graph.sparse_mixer import SPARSE_MIXER
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.engine import DOMAIN

FAR = 1e30
"""What the difference of unequal ranks times is far more than 1, and float32 knows."""


class Router:
    """Lowers one `Route`."""

    def __init__(self, nodes: Emitter, route: Route) -> None:
        self._nodes = nodes
        self._route = route
        self._at = route.weights.name.removesuffix(".weights")

    def lower(self, logits: str) -> None:
        """f32[T, experts] -> the values of the route: f32[T, K] and i64[T, K]."""
        rule, nodes = self._route.routing, self._nodes
        if rule.identities:
            self._lower_with_identities(logits, rule)
            return
        names = self._names(rule)
        if rule.scores == "sparse mixer":
            nodes.functions[SPARSE_MIXER.name] = SPARSE_MIXER
            results = next(names), self._route.chosen.name
            weights = nodes.node(SPARSE_MIXER.name, [logits], *results, domain=DOMAIN, tolerance=rule.tolerance)
        elif rule.scores == "softmax of chosen":
            weights = nodes.node("Softmax", [self._best(logits, rule, f"{self._at}.largest")], next(names), axis=-1)
        elif rule.scores == "sigmoid of chosen":
            weights = nodes.node("Sigmoid", [self._best(logits, rule, f"{self._at}.largest")], next(names))
        else:
            odds = f"{self._at}.odds"
            if rule.scores == "softmax":
                scores = nodes.node("Softmax", [logits], odds, axis=-1)
            else:
                assert rule.scores == "sigmoid"
                scores = nodes.node("Sigmoid", [logits], odds)
            weights = self._best(scores, rule, next(names))
        if rule.normalised:
            total = nodes.node("ReduceSum", [weights, nodes.integers([1])], f"{self._at}.total", keepdims=1)
            if rule.epsilon:
                total = nodes.node("Add", [total, nodes.floats(rule.epsilon)], f"{self._at}.total.positive")
            weights = nodes.node("Div", [weights, total], next(names))
        if rule.scaling != 1.0:
            weights = nodes.node("Mul", [weights, nodes.floats(rule.scaling)], next(names))
        if rule.gains is not None:
            piece = Piece(rule.gains.name, range(rule.gains.out.size))
            gains = nodes.weight(Weight(f"{self._at}.gains", (piece,)))
            own = nodes.node("Gather", [gains, self._route.chosen.name], f"{self._at}.gains.chosen", axis=0)
            nodes.node("Mul", [weights, own], next(names))

    def _lower_with_identities(self, logits: str, rule: Routing) -> None:
        """The same where rows may choose themselves.

        What a row chooses ranks as high as the last of its choice at least. Of experts the best K are told, of which
        those that it has not chosen weigh 0.
        """
        nodes, at, route = self._nodes, self._at, self._route
        assert route.kept is not None
        experts = route.logits.axis.size - rule.identities
        scores = nodes.node("Softmax", [logits], f"{at}.odds", axis=-1)
        ranked = self._ranked(scores, rule)
        least = f"{at}.best"
        count = nodes.integers([rule.chosen])
        nodes.node("TopK", [ranked, count], least, f"{at}.best.which", axis=-1, largest=1, sorted=1)
        if rule.chosen > 1:
            least = nodes.split(least, {f"{at}.better": rule.chosen - 1, f"{at}.least": 1})[1]
        below = nodes.node("Mul", [least, nodes.floats(-1.0)], f"{at}.below")
        kinds = {"experts": experts, "identities": rule.identities}
        own, kept = nodes.split(scores, {f"{at}.odds.{kind}": size for kind, size in kinds.items()})
        if ranked != scores:
            first, rest = nodes.split(ranked, {f"{at}.ranked.{kind}": size for kind, size in kinds.items()})
        else:
            first, rest = own, kept
        largest = self._top(first, rule.chosen, f"{at}.ranked.largest")
        found = nodes.node("GatherElements", [own, route.chosen.name], f"{at}.found", axis=1)
        counted = nodes.node("Mul", [found, self._counts(largest, below)], f"{at}.counted")
        nodes.node("Mul", [counted, nodes.floats(rule.scaling)], route.weights.name)
        self_chosen = nodes.node("Mul", [kept, self._counts(rest, below)], f"{at}.itself")
        total = nodes.node("ReduceSum", [self_chosen, nodes.integers([1])], f"{at}.itself.total", keepdims=1)
        nodes.node("Mul", [total, nodes.floats(rule.scaling)], route.kept.name)

    def _counts(self, ranks: str, below: str) -> str:
        """1 where a rank is not less than the row's number whose negative `below` is, f32[T, 1]; else 0."""
        nodes = self._nodes
        above = nodes.node("Add", [ranks, below], f"{ranks}.above")
        far = nodes.node("Mul", [above, nodes.floats(FAR)], f"{ranks}.far")
        more = nodes.node("Add", [far, nodes.floats(1.0)], f"{ranks}.more")
        return nodes.node("Clip", [more, nodes.floats(0.0), nodes.floats(1.0)], f"{ranks}.counts")

    def _names(self, rule: Routing) -> Iterator[str]:
        """What the weights are called after each step: the route's name after the last one."""
        steps = 1 + rule.normalised + (rule.scaling != 1.0) + (rule.gains is not None)
        yield from (f"{self._at}.step.{step}" for step in range(1, steps))
        yield self._route.weights.name

    def _best(self, scores: str, rule: Routing, values: str) -> str:
        """Those of the scores that the experts have that are chosen by them."""
        ranked = self._ranked(scores, rule)
        if ranked == scores:
            return self._top(scores, rule.chosen, values)
        self._top(ranked, rule.chosen, f"{self._at}.ranked.largest")
        return self._nodes.node("GatherElements", [scores, self._route.chosen.name], values, axis=1)

    def _ranked(self, scores: str, rule: Routing) -> str:
        """The scores that experts are chosen by."""
        if rule.correction is not None:
            piece = Piece(rule.correction.name, range(rule.correction.out.size))
            bias = self._nodes.weight(Weight(f"{self._at}.correction", (piece,)))
            scores = self._nodes.node("Add", [scores, bias], f"{self._at}.ranked")
        return self._best_groups(scores, rule) if rule.groups_kept < rule.groups else scores

    def _top(self, scores: str, count: int, values: str) -> str:
        """The largest scores of each row; which they are is the route's choice."""
        return self._nodes.node(
            "TopK",
            [scores, self._nodes.integers([count])],
            values,
            self._route.chosen.name,
            axis=-1,
            largest=1,
            sorted=1,
        )

    def _best_groups(self, ranked: str, rule: Routing) -> str:
        """Scores of experts in groups that do not count become so small that nobody chooses them.

        A group counts by the sum of its two best scores.
        """
        nodes, at = self._nodes, self._at
        experts = self._route.logits.axis.size
        apart = nodes.node(
            "Reshape", [ranked, nodes.integers((-1, rule.groups, experts // rule.groups))], f"{at}.groups"
        )
        nodes.node("TopK", [apart, nodes.integers([2])], f"{at}.two", f"{at}.two.which", axis=-1, largest=1, sorted=1)
        worth = nodes.node("ReduceSum", [f"{at}.two", nodes.integers([2])], f"{at}.worth", keepdims=0)
        kept = nodes.integers([rule.groups_kept])
        nodes.node("TopK", [worth, kept], f"{at}.best", f"{at}.best.which", axis=-1, largest=1, sorted=1)
        last = nodes.node("ReduceMin", [f"{at}.best", nodes.integers([1])], f"{at}.least", keepdims=1)
        counts = nodes.node("GreaterOrEqual", [worth, last], f"{at}.counts")
        mask = nodes.node("Unsqueeze", [counts, nodes.integers([2])], f"{at}.mask")
        kept_scores = nodes.node("Where", [mask, apart, nodes.floats(-3e38)], f"{at}.kept")
        return nodes.node("Reshape", [kept_scores, nodes.integers((-1, experts))], f"{at}.kept.rows")
