/* Quantising weights, see codes.c: 16 lanes, of which the compiler makes what a level has. */
#include "codes.h"

enum { WIDE = 16, TRIALS = 7 };
typedef float wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t wide_ints __attribute__((vector_size(4 * WIDE)));

static const float trials[TRIALS] = {8.0f, 7.6f, 7.2f, 6.8f, 6.4f, 8.4f, 8.8f};
/* The smallest peak with a finite reciprocal, for blocks of zeros or of next to nothing. */
static const float least_peak = 1e-30f;

/* Some values of a block of `size`, those beyond it 0. */
ALWAYS wide some_of(const float *x, int from, int size) {
    wide value = {0};
    if (from + WIDE <= size) memcpy(&value, x + from, sizeof value);
    else memcpy(&value, x + from, (size_t)(size - from) * sizeof *x);
    return value;
}

/* The codes of values; conversion truncates, so half more rounds. */
ALWAYS wide_ints coded(wide value, float inverse, float zero) {
    const wide lowest = {0}, highest = lowest + (2.0f * zero - 1.0f);
    const wide level = value * inverse + (zero + 0.5f);
    return __builtin_convertvector(__builtin_elementwise_min(__builtin_elementwise_max(level, lowest), highest), wide_ints);
}

ALWAYS float added(wide v) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    const eight e = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const four f = __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
    return (f[0] + f[2]) + (f[1] + f[3]);
}

ALWAYS float peak_of(const float *x, int size) {
    wide lowest = {0}, highest = {0};
    for (int i = 0; i < size; i += WIDE) {
        const wide value = some_of(x, i, size);
        lowest = __builtin_elementwise_min(lowest, value);
        highest = __builtin_elementwise_max(highest, value);
    }
    const float low = __builtin_reduce_min(lowest), high = __builtin_reduce_max(highest);
    const float peak = high > -low ? high : low;
    return peak < least_peak && peak > -least_peak ? least_peak : peak;
}

static void encode(const struct encoding *e) {
    const int four = e->bits == 4, size = e->block;
    const float zero = four ? 8.0f : 128.0f;
    for (int64_t number = 0; number < e->blocks; number++) {
        const float *x = e->values + number * size;
        const float peak = peak_of(x, size);
        float inverse = -zero / peak, scale = peak / -zero;
        double best = -1.0;
        for (int trial = 0; four && trial < TRIALS; trial++) {
            const float tried = -trials[trial] / peak;
            wide products = {0}, squares = {0};
            for (int i = 0; i < size; i += WIDE) {
                const wide value = some_of(x, i, size);
                const wide q = __builtin_convertvector(coded(value, tried, zero), wide) - zero;
                products += value * q;
                squares += q * q;
            }
            const float product = added(products), square = added(squares);
            const double explained = square > 0.0f ? (double)product * product / square : 0.0;
            if (explained > best) {
                best = explained;
                inverse = tried;
                scale = product != 0.0f ? product / square : peak / -trials[trial];
            }
        }
        e->scales[number] = scale;
        uint8_t *codes = e->codes + number * size / (four ? 2 : 1);
        for (int i = 0; i < size; i += WIDE) {
            typedef uint8_t wide_bytes __attribute__((vector_size(WIDE)));
            const wide_bytes own = __builtin_convertvector(coded(some_of(x, i, size), inverse, zero), wide_bytes);
            const int count = i + WIDE <= size ? WIDE : size - i;
            if (four)
                for (int pair = 0; pair < count / 2; pair++)
                    codes[i / 2 + pair] = (uint8_t)(own[2 * pair] | own[2 * pair + 1] << 4);
            else
                memcpy(codes + i, &own, (size_t)count);
        }
    }
}
