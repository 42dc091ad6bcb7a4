"""Sampling over a sharded vocabulary against a plain implementation that sees all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.sampling.choice import Choice, LogitsError, NeedMore, choose, initial_want
from motley.daemon.sampling.noise import gumbel, noise_of
from motley.daemon.sampling.parameters import SamplingError, SamplingParams
from motley.daemon.sampling.shard import ShardSampler
from motley.daemon.sampling.summary import SummaryError
from motley.protocol import mesh_pb2

F32 = npt.NDArray[np.float32]


class Ranks:
    """All ranks of one sequence; `cuts` are the inner boundaries of their slices."""

    def __init__(
        self, params: SamplingParams, vocabulary: int, cuts: Sequence[int], prompt: Sequence[int], block: int = 16
    ) -> None:
        self.params = params
        self.slices = list(pairwise([0, *sorted(cuts), vocabulary]))
        self.samplers = [ShardSampler(params, start, stop - start, prompt, block) for start, stop in self.slices]
        self.rounds = 0

    def sample(
        self, logits: F32, step: int, want: int | None = None, allowed: npt.NDArray[np.bool_] | None = None
    ) -> Choice:
        want = want or initial_want(self.params)
        for _ in range(12):
            self.rounds += 1
            summaries = [
                sampler.summarise(logits[start:stop], step, want, None if allowed is None else allowed[start:stop])
                for sampler, (start, stop) in zip(self.samplers, self.slices, strict=True)
            ]
            choice = choose(summaries, self.params, step)
            if isinstance(choice, Choice):
                for sampler in self.samplers:
                    sampler.accept(step, choice.token)
                return choice
            assert choice.want > want
            want = choice.want
        raise AssertionError("choose() never had enough")


def plain(
    logits: F32,
    params: SamplingParams,
    step: int,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """The definitions, written out over the whole vocabulary."""
    x = logits.copy()
    for token in {*prompt, *output}:
        x[token] = (
            x[token] * np.float32(params.repetition_penalty)
            if x[token] < 0
            else (x[token] / np.float32(params.repetition_penalty))
        )
    for token in set(output):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if allowed is not None:
        x[~allowed] = -np.inf
    if params.temperature == 0:
        return int(np.argmax(x))
    scaled = x.astype(np.float64) / params.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    passing = order[: params.top_k or None]
    mass = np.exp(scaled[passing] - scaled[passing].max())
    mass /= mass.sum()
    if params.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        kept = before < params.top_p - 1e-9
        kept[0] = True
        passing = [token for token, keep in zip(passing, kept, strict=True) if keep]
        mass = mass[kept]
    passing = [token for token, p in zip(passing, mass, strict=True) if p >= params.min_p * mass.max()]
    score = scaled + gumbel(params.seed, step, np.arange(len(x)))
    return max(passing, key=lambda token: (score[token], -token))


def some_logits(seed: int, vocabulary: int, spread: float, ties: bool) -> F32:
    values = np.random.default_rng(seed).normal(scale=spread, size=vocabulary)
    return (np.round(values) if ties else values).astype(np.float32)


def penalties(vocabulary: int) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.7, 1.3]),
            "presence_penalty": st.sampled_from([-1.0, 0.5]),
            "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
            "logit_bias": st.dictionaries(st.integers(0, vocabulary - 1), st.floats(-100, 100, width=16), max_size=3),
        },
    )


@given(data=st.data(), vocabulary=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_every_split_chooses_what_the_whole_vocabulary_would(data: st.DataObject, vocabulary: int, seed: int) -> None:
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])),
        top_k=data.draw(st.sampled_from([0, 0, 1, 3, 40, 1000])),
        top_p=data.draw(st.sampled_from([1.0, 0.0, 0.3, 0.5, 0.95, 0.999999])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.01, 0.4, 1.0])),
        seed=seed,
        **data.draw(penalties(vocabulary)),  # type: ignore[arg-type]
    )
    token = st.integers(0, vocabulary - 1)
    prompt = data.draw(st.lists(token, max_size=5))
    ranks = Ranks(params, vocabulary, data.draw(st.lists(st.integers(0, vocabulary), max_size=4)), prompt)
    first_want = data.draw(st.sampled_from([None, 1, 7]))
    output: list[int] = []
    for step in range(4):
        logits = some_logits(seed + step, vocabulary, data.draw(st.sampled_from([0.0, 1.0, 4.0])), step % 2 == 0)
        before = logits.copy()
        allowed = None
        if data.draw(st.booleans()):
            allowed = np.zeros(vocabulary, np.bool_)
            allowed[data.draw(st.lists(token, min_size=1, max_size=20))] = True
        chosen = ranks.sample(logits, step, first_want, allowed).token
        assert chosen == plain(logits, params, step, prompt, output, allowed)
        assert allowed is None or allowed[chosen]
        assert np.array_equal(logits, before)
        output.append(chosen)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("few", [False, True], ids=["all allowed", "few allowed"])
@pytest.mark.parametrize("chosen_from", [{"top_k": 2}, {"top_k": 8, "top_p": 0.7}, {"min_p": 0.05}, {}], ids=str)
def test_large_slices_choose_likewise(chosen_from: dict[str, float], few: bool, ties: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=3, **chosen_from)  # type: ignore[arg-type]
    for step in range(6):
        logits = some_logits(step, 12000, 3.0, ties)
        allowed = np.arange(12000) % 7 == 5 if not few else np.isin(np.arange(12000), [1, 2999, 9000])
        ranks = Ranks(params, 12000, [9000], [])
        assert ranks.sample(logits, step, None, allowed).token == plain(logits, params, step, [], [], allowed)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_where_all_tokens_are_alike_the_noise_decides(spread: float) -> None:
    logits = some_logits(1, 12000, spread, ties=False)
    for step in range(5):
        params = SamplingParams(temperature=1.0, seed=step)
        assert Ranks(params, 12000, [9000], []).sample(logits, step).token == plain(logits, params, step, [], [])


@pytest.mark.parametrize(("height", "temperature"), [(1e9, 1e-5), (1e20, 1.0), (-3e38, 0.01)])
def test_equal_logits_of_any_height_end(height: float, temperature: float) -> None:
    logits = np.full(4000, height, np.float32)
    params = SamplingParams(temperature=temperature, seed=1)
    assert Ranks(params, 4000, [3000], []).sample(logits, 0).token == plain(logits, params, 0, [], [])


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**31), token=st.integers(0, 2**20))
def test_the_noise_of_one_token_is_that_which_it_has_among_others(seed: int, step: int, token: int) -> None:
    np.testing.assert_allclose(
        noise_of(seed, step, token), gumbel(seed, step, np.array([token]))[0], rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.99),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=1.0, min_p=0.3, top_p=0.98),
    ],
)
def test_a_flat_distribution_asks_for_more_until_the_set_is_proven(params: SamplingParams) -> None:
    logits = some_logits(1, 5000, 0.2, ties=False)
    for step in range(20):
        ranks = Ranks(params, 5000, [1000, 1000, 4990], [])
        assert ranks.sample(logits, step).token == plain(logits, params, step, [], [])
        assert 1 < ranks.rounds <= 4


def test_a_peaked_distribution_needs_one_round() -> None:
    logits = some_logits(1, 5000, 3.0, ties=False)
    ranks = Ranks(SamplingParams(temperature=0.7, top_p=0.9), 5000, [2000], [])
    ranks.sample(logits, 0)
    assert ranks.rounds == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingParams(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(temperature=1.0, min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probability(params: SamplingParams, expected: list[float]) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    ranks = Ranks(params, 4, [1, 1], [])
    draws = 1500
    counts = np.bincount([ranks.sample(logits, step).token for step in range(draws)], minlength=4)
    possible = np.array(expected) > 0
    assert not counts[~possible].any()
    mean = draws * np.array(expected)[possible]
    chi_square = float(((counts[possible] - mean) ** 2 / mean).sum())
    assert chi_square < 16.3  # p = 0.001 at 3 degrees of freedom


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    ids = np.arange(100_000)
    noise = gumbel(7, 3, ids)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    uniform = np.sort(np.exp(-np.exp(-noise)))
    assert np.abs(uniform - (ids + 0.5) / len(ids)).max() < 0.0062  # Kolmogorov-Smirnov, p = 0.001
    for other in (gumbel(7, 4, ids), gumbel(8, 3, ids), np.roll(noise, 1)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.015
    some = np.array([99_999, 5, 31_000])
    assert np.array_equal(gumbel(7, 3, some), noise[some])


def test_seeds_reproduce_and_steps_and_seeds_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def text(seed: int) -> list[int]:
        ranks = Ranks(SamplingParams(temperature=1.0, seed=seed), 1000, [400], [])
        return [ranks.sample(logits, step).token for step in range(8)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert len(set(text(1))) > 4


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_greedy_ties_go_to_the_lowest_id(temperature: float) -> None:
    logits = np.array([0, 2, 1, 2, 2], np.float32)
    for cut in range(6):
        assert Ranks(SamplingParams(temperature=temperature, seed=3), 5, [cut], []).sample(logits, 0).token == 1


def test_exactly_k_tokens_pass_top_k_and_ties_go_to_the_lowest_ids() -> None:
    logits = np.ones(50, np.float32)
    ranks = Ranks(SamplingParams(temperature=1.0, top_k=3), 50, [1, 20], [])
    assert {ranks.sample(logits, step).token for step in range(200)} == {0, 1, 2}


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = some_logits(5, 40, 2.0, ties=False)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    greedy = int(np.argmax(logits))
    params = SamplingParams(logprobs=True, top_logprobs=5, logit_bias={greedy: -100.0})
    for cuts in ([], [3, 3, 39]):
        choice = Ranks(params, 40, cuts, []).sample(logits, 0)
        order = np.argsort(-logits)
        assert choice.token == order[1]
        assert choice.logprob == pytest.approx(expected[order[1]])
        assert [token for token, _ in choice.top] == list(order[:5])
        assert [value for _, value in choice.top] == pytest.approx(expected[order[:5]])
    assert Ranks(replace(params, top_logprobs=0), 40, [7], []).sample(logits, 0).top == ()
    assert Ranks(SamplingParams(), 40, [7], []).sample(logits, 0).logprob is None


@given(st.integers(1, 300), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 2**32), st.booleans())
def test_cuts_between_blocks_give_the_same_bits(vocabulary: int, cuts: list[int], seed: int, spread: bool) -> None:
    logits = some_logits(seed, vocabulary, 30.0 if spread else 1.0, ties=False)
    params = SamplingParams(temperature=0.7, top_p=0.8, seed=seed, logprobs=True, top_logprobs=3)
    between = [min(16 * cut, vocabulary) for cut in cuts]
    for step in range(3):
        assert Ranks(params, vocabulary, between, []).sample(logits, step) == Ranks(params, vocabulary, [], []).sample(
            logits, step
        )


def test_minus_infinity_is_never_drawn_nor_reported() -> None:
    logits = np.array([-np.inf, 1, -np.inf, 1], np.float32)
    params = SamplingParams(temperature=1.0, logprobs=True, top_logprobs=4, repetition_penalty=1.1)
    for extra in ({}, {"top_p": 0.999}, {"top_k": 4}, {"min_p": 1e-6}):
        ranks = Ranks(replace(params, **extra), 4, [1, 3], [0, 1])
        choices = [ranks.sample(logits, step) for step in range(30)]
        assert {choice.token for choice in choices} == {1, 3}
        assert all({token for token, _ in choice.top} == {1, 3} for choice in choices)
    with pytest.raises(LogitsError, match="every logit is -inf"):
        Ranks(params, 4, [2], []).sample(np.full(4, -np.inf, np.float32), 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)])
def test_a_broken_logit_is_reported_with_its_rank_and_token(value: float, params: SamplingParams) -> None:
    logits = some_logits(5, 40, 2.0, ties=False)
    logits[23] = value
    with pytest.raises(LogitsError, match=r"rank 1 .* \(token 23\)"):
        Ranks(params, 40, [20], []).sample(logits, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3.0),
        ("seed", -1),
        ("top_logprobs", 21),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: float("nan")}),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=f"{field}.*between .* and .*, not "):
        SamplingParams(**{field: value, **({"logprobs": True} if field == "top_logprobs" else {})})  # type: ignore[arg-type]


def test_alternatives_need_logprobs() -> None:
    with pytest.raises(SamplingError, match="top_logprobs"):
        SamplingParams(top_logprobs=2)


def test_every_field_comes_over_the_wire() -> None:
    message = mesh_pb2.Sampling(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=2**63,
        logit_bias={7: -5.0},
        logprobs=True,
        top_logprobs=3,
    )
    read = SamplingParams.from_proto(mesh_pb2.Sampling.FromString(message.SerializeToString()))
    assert read == SamplingParams(0.5, 4, 0.75, 0.25, 1.5, -1, 2, 2**63, {7: -5.0}, True, 3)


def test_summaries_that_do_not_fit_are_refused() -> None:
    params = SamplingParams()
    logits = np.arange(10, dtype=np.float32)
    left = ShardSampler(params, 0, 10, [], 16).summarise(logits, 0, 1)
    right = ShardSampler(params, 10, 10, [], 16).summarise(logits, 0, 1)
    assert choose([left, right], params, 0) == Choice(9)
    for broken in (b"", left[:-1], left + b"x"):
        with pytest.raises(SummaryError, match="bytes"):
            choose([broken, right], params, 0)
    with pytest.raises(SummaryError, match=r"rank 0 .* from 10 on"):
        choose([right, left], params, 0)
    with pytest.raises(ValueError, match="slice of 10 rows"):
        ShardSampler(params, 0, 10, [], 16).summarise(logits[:9], 0, 1)


def test_need_more_says_how_many() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    summary = ShardSampler(params, 0, 1000, [], 16).summarise(np.zeros(1000, np.float32), 0, 10)
    assert choose([summary], params, 0) == NeedMore(80)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=30), st.lists(st.integers(0, 9), max_size=4))
def test_a_guess_that_was_wrong_leaves_nothing_behind(said: list[tuple[int, int]], prompt: list[int]) -> None:
    """Tokens are guessed, summarised after, and replaced; another rank has never heard the guesses."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32)

    def sampler() -> ShardSampler:
        return ShardSampler(params, 1, 8, prompt, 16)

    guessing, answer = sampler(), list[int]()
    for back, token in said:
        step = max(0, len(answer) - back)
        answer[step:] = [token]
        guessing.accept(step, token)
        if token % 3:
            guessing.summarise(logits, step + token % 2, 3)
    for step in range(len(answer) + 1):
        plainly = sampler()
        for number, token in enumerate(answer):
            plainly.accept(number, token)
        assert guessing.summarise(logits, step, 8) == plainly.summarise(logits, step, 8)
