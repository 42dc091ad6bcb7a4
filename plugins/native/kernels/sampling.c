/* What sampling must know of all tokens of a slice of the vocabulary, of which there may be 100 000s.
 *
 * - A draw gives a token the score logit / temperature + noise, with Gumbel noise -log(-log(u)) of a uniform u, the upper
 *   52 bits of SplitMix64's output for the token (noise.py), placed inside (0, 1); the greatest score wins. Logarithms
 *   of all tokens would take most of the time: as -log(u) >= 1 - u, a token that is d below `least`, the score of some
 *   other token, can win only where 1 - u < e^-d. Those for which that is so, or nearly, are the contenders, a few;
 *   whoever asks scores them.
 * - Masses: of a stretch, its greatest logit (0 where all are -inf), and the sum of e^x, with x = (logit - greatest) times
 *   1 / temperature, in doubles: lane i of 8 adds elements i, i + 8, ...; lanes are added as halves. e^x is 2^n times e^r,
 *   with n = x / ln 2 rounded to even and r what is left of x, by Taylor's polynomial up to r^12; it is 0 below x = -700.
 *   Nothing is contracted: every level has the same bits.
 */
#include "library.h"

/* The tokens that may win a draw, in their order; how many they are. */
EXPORT int64_t motley_contenders(const struct draw *draw) { return kernels->contend(draw); }

EXPORT void motley_masses(const struct masses *masses) { kernels->add_masses(masses); }
