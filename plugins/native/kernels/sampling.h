/* What sampling must know of all tokens of a slice: between sampling.c and the kernels. */
#ifndef MOTLEY_SAMPLING_H
#define MOTLEY_SAMPLING_H
#include <stdint.h>

/* SHARED with structs.py. A draw of one of so many tokens: see sampling.c. */
struct draw {
    const float *logits; /* none NaN or +inf */
    int32_t *contenders; /* room for as many as there are tokens */
    int64_t tokens;
    uint64_t state; /* of the first token: its noise is mixed of it, that of the next one of GOLDEN more */
    double temperature, least;
};

/* SHARED with structs.py. Sums of exponentials over stretches of logits: see sampling.c. */
struct masses {
    const float *logits;   /* none NaN or +inf */
    const int64_t *starts; /* of stretches, ascending, the first at 0 */
    double *peaks, *sums;
    int64_t tokens, stretches;
    double temperature;
};
#endif
