"""What a token about takes on some nodes, or takes at least, before shares are cut for them: for searches. Pure.

Units are taken for fluid here, a sum for the time in which its rows can reach anybody, or for that of the simplest
schedules. What is found to be promising is then forecast in full (`motley.orchestrator.planning.cost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from motley.orchestrator.planning.choosing.arrangement import Members
from motley.orchestrator.planning.cost import WIRE_BYTES, Pace, Workload, lead_s
from motley.orchestrator.planning.cutting.shares import Candidate, pour
from motley.protocol.mesh_pb2 import ModelProfile
from motley.transport.schedules.forecast import SUM_S, Network


@dataclass
class Estimates:
    """What is estimated of some candidates; for the attributes see
    `motley.orchestrator.planning.choosing.choice.Chooser`."""

    profiles: Sequence[ModelProfile]
    candidates: Sequence[Candidate]
    cache_tokens: int
    network: Network
    work: Workload
    _alone: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    """By candidate: see `alone_s`."""

    @property
    def profile(self) -> ModelProfile:
        """Of the model, where it does not matter how it is held."""
        return self.profiles[0]

    def has_room(self, members: Members) -> bool:
        """Whether the model could fit, were its units fluid."""
        left = 1.0
        for number in members:
            room = self.candidates[number].memory - self.profiles[number].fixed_bytes
            if room < 0:
                return False
            left -= room / self.whole_bytes(number)
        return left <= 0

    def whole_bytes(self, number: int) -> int:
        """Bytes of all of the model, its caches among them, as a candidate would hold it."""
        profile = self.profiles[number]
        group = profile.attention_query_bytes + profile.attention_kv_bytes
        group += profile.cache_bytes_per_token * self.cache_tokens + profile.state_bytes
        fill = profile.mlp_units * profile.mlp_unit_bytes + profile.vocabulary_units * profile.vocabulary_unit_bytes
        shared = profile.shared_kv_bytes + profile.shared_cache_bytes_per_token * self.cache_tokens
        heads = profile.kv_groups // profile.groups_per_shared_head if profile.groups_per_shared_head else 0
        return max(1, profile.kv_groups * group + heads * shared + fill)

    def least_s(self, members: Members) -> float:
        """Seconds that a token surely takes on a set whose members all have shares of all layers."""
        return self._fluid_s(members) + 2 * self.profile.layers * self.least_sum_s(members)

    def rough_s(self, members: Members) -> float:
        """About what a token takes on such a set."""
        computing = self._poured_s(members)
        if len(members) == 1:
            return computing
        a_sum = self.rough_sum_s(members) + max(self.candidates[number].host_s for number in members)
        return computing + 2 * self.profile.layers * a_sum + lead_s(self.network, members)

    def least_sum_s(self, members: Members) -> float:
        """Seconds that a sum surely takes."""
        if len(members) == 1:
            return 0.0
        latency, bandwidth = self.network.latency, self.network.bandwidth
        nearest = max(min(latency[one][other] for other in members if other != one) for one in members)
        widest = max(bandwidth[one][other] for one in members for other in members if other != one)
        return nearest + 2 * self.network.frame_s + self._sum_bytes / widest

    def rough_sum_s(self, members: Members) -> float:
        """About what a sum takes: in one step, or in two."""
        count = len(members)
        if count == 1:
            return 0.0
        latency, bandwidth = self.network.latency, self.network.bandwidth
        pairs = [(one, other) for one in members for other in members if one < other]
        farthest = max(latency[one][other] for one, other in pairs)
        narrowest = min(bandwidth[one][other] for one, other in pairs)
        nbytes = self._sum_bytes
        frame, summed = self.network.frame_s, nbytes * SUM_S
        one_shot = farthest + (count - 1) * (2 * frame + nbytes / narrowest + summed)
        two_shot = 2 * farthest + (count - 1) * (4 * frame + 2 * nbytes / count / narrowest) + summed
        return min(one_shot, two_shot)

    @property
    def _sum_bytes(self) -> float:
        return self.profile.hidden * self.work.rows * WIRE_BYTES[self.work.wire]

    def _poured_s(self, members: Members) -> float:
        """About what a set takes to compute a token within its memory, were its units fluid."""
        alone = [self.alone_s(number) for number in members]
        rooms = (self.candidates[number].memory - self.profiles[number].fixed_bytes for number in members)
        caps = [room / self.whole_bytes(number) for room, number in zip(rooms, members, strict=True)]
        seconds = [sum(own[:3]) for own in alone]
        parts = pour(1.0, [1 / own for own in seconds], caps)
        return max(part * own for part, own in zip(parts, seconds, strict=True)) + min(own[3] for own in alone)

    def _fluid_s(self, members: Members) -> float:
        """Seconds in which a set computes a token, were its units fluid, and its memory no matter."""
        layers, head, calls = self.fluid_parts_s(members)
        return layers + head + calls

    def fluid_parts_s(self, members: Members) -> tuple[float, float, float]:
        """Seconds in which a set computes all layers for a token, and the head, were units fluid, and memory no matter;
        and those of its calls."""
        alone = [self.alone_s(number) for number in members]
        attention, mlp, head = (1 / sum(1 / own[part] for own in alone) for part in range(3))
        return attention + mlp, head, min(own[3] for own in alone)

    def alone_s(self, number: int) -> tuple[float, float, float, float]:
        """Seconds in which a candidate would compute all attention, all MLPs and all of the head for a token, and those
        of its calls, which more ranks make no fewer."""
        if number not in self._alone:
            profile, work = self.profiles[number], self.work
            pace = Pace(profile, self.candidates[number], 1, work.rows, work.position)
            calls = sum(pace.calls_s)
            attention = pace.attention_s(range(profile.kv_groups)) - pace.calls_s[0]
            mlp, head = profile.mlp_units * pace.mlp_s, profile.vocabulary_units * pace.head_s
            self._alone[number] = (max(attention, 1e-12), max(mlp, 1e-12), max(head, 1e-12), calls)
        return self._alone[number]
