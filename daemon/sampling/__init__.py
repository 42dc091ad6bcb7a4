"""Choosing the next token when every rank holds the logits of its own slice of the vocabulary.

Logits never travel. Every rank *summarises* its slice (its best candidates, and the sums that a filter or a report
needs), and the scheduler *chooses* from the summaries of all. The same logits, parameters and seed give the same token
however the vocabulary is cut. One step of one sequence:

1. every rank: ``summary = sampler.summarise(logits, step, want)``, with ``want = initial_want(params)`` at first
   (`shard.ShardSampler`, `choice.initial_want`);
2. the scheduler, with the summaries of all ranks: ``choose(summaries, params, step)`` (`choice.choose`). It returns a
   `Choice`, or a `NeedMore`: the candidates do not yet prove which tokens may be sampled, and all ranks repeat step 1
   with its ``want``;
3. every rank: ``sampler.accept(step, choice.token)``. Whoever has accepted a guess accepts what was chosen instead for
   the same step.

The order is the one of Hugging Face and vLLM: penalties and bias, temperature, top-k, top-p, min-p. The draw is
Gumbel-max: of the allowed tokens, the one with the greatest ``logit / temperature + noise``, where the noise is a
function of (seed, step, token id) alone (`noise.gumbel`), so that every rank can draw for its slice. Exactly `top_k`
tokens pass the top-k filter, ties going to the lower id (Hugging Face keeps all that tie). Log-probabilities are those
of the model: log-softmax of the raw logits, before penalties, bias and temperature.

Sums over the vocabulary are taken block by block, then over the blocks of all ranks, so that they have the same bits
wherever slices begin at borders of blocks.
"""
