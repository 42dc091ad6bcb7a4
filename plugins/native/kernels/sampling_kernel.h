/* The kernels of sampling.c: 8 lanes of 8 bytes, of which the compiler makes what a level has. */
#include "sampling.h"

enum { LONG_LANES = 8 };
typedef float short_floats __attribute__((vector_size(4 * LONG_LANES)));
typedef double long_floats __attribute__((vector_size(8 * LONG_LANES)));
typedef int64_t long_ints __attribute__((vector_size(8 * LONG_LANES)));
typedef uint64_t long_words __attribute__((vector_size(8 * LONG_LANES)));

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15; /* SHARED, as what mixes below, with motley.daemon.sampling.noise */
static const double LOG2_E = 0x1.71547652b82fep0;
static const double WHOLE = 0x1.8p52; /* a sum with it ends in the bits of a whole number */

ALWAYS long_floats all_long(double value) { return value - (long_floats){0}; }

/* Of `left` logits the first ones, in doubles; -inf beyond them. */
ALWAYS long_floats some_logits(const float *from, int64_t left) {
    short_floats some = __builtin_inff() * -1 - (short_floats){0};
    if (left >= LONG_LANES) memcpy(&some, from, sizeof some);
    else memcpy(&some, from, (size_t)left * sizeof *from);
    return __builtin_convertvector(some, long_floats);
}

static int64_t contend(const struct draw *d) {
    const long_words lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const double slack = 1e-6 + 1e-13 * (d->least < 0 ? -d->least : d->least); /* more than rounding takes away */
    const double least = (d->least - slack) * LOG2_E, warmth = LOG2_E / d->temperature;
    long_words state = d->state + lanes * GOLDEN;
    int64_t count = 0;
    for (int64_t at = 0; at < d->tokens; at += LONG_LANES, state += LONG_LANES * GOLDEN) {
        const long_floats behind = least - some_logits(d->logits + at, d->tokens - at) * warmth;
        const long_floats bounded =
            __builtin_elementwise_min(__builtin_elementwise_max(behind, all_long(0)), all_long(63));
        const long_words halvings = (long_words)(bounded - 0.5 + WHOLE) & 63; /* at most how far it is behind */
        long_words mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9;
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
        mixed ^= mixed >> 31;
        const long_words one = (long_words){0} + ((uint64_t)1 << 52), missing = one - (mixed >> 12); /* of u, to 1 */
        const long_ints may_win = (long_ints)(missing <= one >> halvings);
        if (__builtin_reduce_or(may_win))
            for (int lane = 0; lane < LONG_LANES; lane++)
                if (may_win[lane]) d->contenders[count++] = (int32_t)(at + lane);
    }
    return count;
}

/* e^x of x <= 0 */
ALWAYS long_floats long_exponential(long_floats x) {
    const long_ints counts = x >= -700.0;
    x = __builtin_elementwise_max(x, all_long(-700));
    const long_floats shifted = x * LOG2_E + WHOLE, n = shifted - WHOLE;
    const long_floats r = x - n * 0x1.62e42fefa38p-1 - n * 0x1.ef35793c7673p-45; /* n times the first is exact */
    const long_floats r2 = r * r, r4 = r2 * r2;
    const long_floats low = (1 + r) + (0.5 + r * (1.0 / 6)) * r2;
    const long_floats middle = (1.0 / 24 + r * (1.0 / 120)) + (1.0 / 720 + r * (1.0 / 5040)) * r2;
    const long_floats high = (1.0 / 40320 + r * (1.0 / 362880)) + (1.0 / 3628800 + r * (1.0 / 39916800)) * r2;
    const long_floats p = low + (middle + (high + r4 * (1.0 / 479001600)) * r4) * r4;
    const long_ints exponent = (long_ints)shifted - (long_ints)all_long(WHOLE) + 1023;
    return (long_floats)((long_ints)(p * (long_floats)(exponent << 52)) & counts);
}

static void add_masses(const struct masses *m) {
    const double warmth = 1 / m->temperature;
    for (int64_t stretch = 0; stretch < m->stretches; stretch++) {
        const int64_t begin = m->starts[stretch];
        const int64_t end = stretch + 1 < m->stretches ? m->starts[stretch + 1] : m->tokens;
        long_floats greatest = all_long(-__builtin_inf()), sums = {0};
        for (int64_t at = begin; at < end; at += LONG_LANES)
            greatest = __builtin_elementwise_max(greatest, some_logits(m->logits + at, end - at));
        double peak = __builtin_reduce_max(greatest);
        if (peak == -__builtin_inf()) peak = 0;
        for (int64_t at = begin; at < end; at += LONG_LANES)
            sums += long_exponential((some_logits(m->logits + at, end - at) - peak) * warmth);
        m->peaks[stretch] = peak;
        m->sums[stretch] = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    }
}
