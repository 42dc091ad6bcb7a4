/* Weights as codes in blocks: between codes.c and the kernels. */
#ifndef MOTLEY_CODES_H
#define MOTLEY_CODES_H
#include <stdint.h>

/* SHARED with structs.py. Blocks of weights, one after another, to codes and a scale each: see codes.c. */
struct encoding {
    const float *values;
    uint8_t *codes; /* a byte each, or two of 4 bits to a byte, the first in the low ones */
    float *scales;
    int64_t blocks;
    int32_t block, bits; /* block: even */
};
#endif
