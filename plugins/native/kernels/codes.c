/* Quantising weights: which code each value of a block has, and what the block's codes are multiplied by.
 *
 * A code stands for (code - zero) * scale, with a zero of 8 or 128. Codes are those of a scale that is tried: the value
 * of largest magnitude, with its sign, over minus so many levels. Of 8 bits there is one trial, 128 levels, and that is
 * the scale. Of 4 bits there are several: a scale that is too small for the largest value fits the others better. Given
 * the codes, the scale with the least sum of squared errors is sum(x * q) / sum(q * q), q being codes less zero, and what
 * it leaves is sum(x * x) less sum(x * q)^2 / sum(q * q); the trial for which that is least is taken.
 *
 * Sums are in float32, of 16 lanes that are added by halves, and nothing is contracted: every level has the same bits. */
#include "library.h"

/* Encode blocks. */
EXPORT void motley_encode(const struct encoding *e) { kernels->encode(e); }
