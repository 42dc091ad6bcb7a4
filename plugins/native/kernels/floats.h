/* What is done with vectors of floats, of one level. */
ALWAYS floats all_lanes(float value) { return value - (floats){0}; }

/* By lane: a where `which` is true (all ones), else b. */
ALWAYS floats choose(ints which, floats a, floats b) { return (floats)((which & (ints)a) | (~which & (ints)b)); }

/* `count` floats, or as many as there are lanes; the lanes left are 0. */
ALWAYS floats load_floats(const float *from, int64_t count) {
    floats value;
    if (count < LANES) return load_first(from, (int)count);
    memcpy(&value, from, sizeof value);
    return value;
}

ALWAYS void store_floats(float *to, floats value, int64_t count) {
    if (count < LANES) store_first(to, value, (int)count);
    else memcpy(to, &value, sizeof value);
}

/* Of two vectors of groups of lanes: each group's first half plus its second half. */
#define HALF_OF(lane, group, second) \
    ((lane) / ((group) / 2) * (group) + (lane) % ((group) / 2) + (second) * (group) / 2)
#define HALVES_4(g, s) HALF_OF(0, g, s), HALF_OF(1, g, s), HALF_OF(2, g, s), HALF_OF(3, g, s)
#define HALVES_8(g, s) HALVES_4(g, s), HALF_OF(4, g, s), HALF_OF(5, g, s), HALF_OF(6, g, s), HALF_OF(7, g, s)
#define HALVES_16(g, s) HALVES_8(g, s), HALF_OF(8, g, s), HALF_OF(9, g, s), HALF_OF(10, g, s), HALF_OF(11, g, s), \
                        HALF_OF(12, g, s), HALF_OF(13, g, s), HALF_OF(14, g, s), HALF_OF(15, g, s)
#define FOLD_(a, b, g, list) (__builtin_shufflevector(a, b, list(g, 0)) + __builtin_shufflevector(a, b, list(g, 1)))
#define FOLD(a, b, g) FOLD_(a, b, g, HALVES)

/* The sums of 16 lanes each, in the order that matmul.c states, `count` of them. */
ALWAYS void add_lanes(floats v[PARTS][TILE], const int count, float *totals) {
    UNROLL for (int half = PARTS / 2; half; half /= 2)
        UNROLL for (int p = 0; p < half; p++)
            UNROLL for (int i = 0; i < count; i++) v[p][i] += v[p + half][i];
    UNROLL for (int group = LANES, left = count; group > 1; group /= 2, left = (left + 1) / 2)
        UNROLL for (int i = 0; i < left; i += 2) {
            floats a = v[0][i], b = i + 1 < left ? v[0][i + 1] : a;
            v[0][i / 2] = group == 16  ? FOLD(a, b, LANES)
                          : group == 8 ? FOLD(a, b, LANES < 8 ? LANES : 8)
                          : group == 4 ? FOLD(a, b, 4)
                                       : FOLD(a, b, 2);
        }
    memcpy(totals, v, (size_t)count * 4);
}

/* As add_lanes, of LANES sums, but a lane has the piece that pieces_of_lanes says: its tree begins within each four lanes. */
ALWAYS floats add_pieces(floats v[PARTS][LANES]) {
    UNROLL for (int half = PARTS / 2; half; half /= 2)
        UNROLL for (int p = 0; p < half; p++)
            UNROLL for (int i = 0; i < LANES; i++) v[p][i] += v[p + half][i];
    UNROLL for (int left = LANES; left > 1; left /= 2) { /* vectors, each of the lanes of LANES / left rows */
        const int group = left == LANES ? 4 : left == LANES / 2 ? 2 : left;
        UNROLL for (int i = 0; i < left; i += 2)
            v[0][i / 2] = group == 4 ? FOLD(v[0][i], v[0][i + 1], 4) : FOLD(v[0][i], v[0][i + 1], 2);
    }
    return v[0][0];
}

ALWAYS floats power_of_two(ints n) { return (floats)((n + 127) << 23); }

/* e^x of x <= 0, within 1 ulp; 0 below -104, NaN of NaN. With n = x / ln 2, rounded to even, and r = x - n ln 2 in two
 * steps: 2^n times a polynomial in r (minimax, relative error 5e-9), in two factors as the least 2^n are no floats. */
ALWAYS floats exponential(floats x) {
    const floats magic = all_lanes(0x1.8p23f); /* a sum with it ends in the bits of a whole number */
    x = choose(x < -104.f, all_lanes(-104), x);
    const floats shifted = fused(x, all_lanes(0x1.715476p0f), magic), n = shifted - magic;
    floats r = fused(n, all_lanes(-0x1.62e43p-1f), x);
    r = fused(n, all_lanes(0x1.05c61p-29f), r);
    floats p = fused(all_lanes(0x1.6a23dcp-10f), r, all_lanes(0x1.123a26p-7f));
    p = fused(p, r, all_lanes(0x1.5558f4p-5f));
    p = fused(p, r, all_lanes(0x1.55549p-3f));
    p = fused(p, r, all_lanes(0x1.fffffcp-2f));
    p = fused(p, r, all_lanes(1));
    p = fused(p, r, all_lanes(1));
    const ints whole = (ints)shifted - (ints)magic, half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
}
