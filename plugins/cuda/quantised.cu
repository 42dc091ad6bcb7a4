// Products by 4- and 8-bit codes, of activations that are quantised to 8 bits first. The arithmetic, and so every bit of
// a result, is that of plugins/native/matmul.c, which states it; what it calls a lane is a *part* here.
//
// A row of weights is cut in units of one or several stretches of 64 bytes. Four neighbouring threads have a row: each
// reads 16 bytes of a stretch at once, which are four parts, and a warp has eight rows. Codes of the next units are under
// way while those of one are multiplied. The integers of a part are added up from a magic number on, so that the bits of
// the sum are those of a float, 1.5 * 2^23 more than the sum.

constexpr int STRETCH = 64;           // bytes
constexpr int PARTS = 16;             // of a stretch
constexpr int THREADS_OF_A_ROW = 4;   // each has four parts
constexpr int UNITS_AHEAD = 4;        // whose codes a thread has under way
constexpr int MAGIC = 0x4B400000;     // the bits of...
constexpr float MAGIC_VALUE = 12582912.f;

// Bytes of a token's unit: two scales of each thread of a row, a first sum of each part, and codes. Of 4-bit weights the
// even elements of a stretch come before its odd ones, as their codes are the lower and the upper halves of bytes.
constexpr int HEAD_BYTES = 4 * 2 * THREADS_OF_A_ROW + 4 * PARTS;
__device__ constexpr int unit_bytes(int bits, int stretches) { return HEAD_BYTES + stretches * STRETCH * (8 / bits); }

// Quantises x: f32[tokens, columns] for `products` below, 16 threads a unit. `to`: `units` units of each token. A block
// has 2^block_shift columns, and is as long as a unit or a part of one.
template <int BITS, int STRETCHES>
__device__ void quantise(const float* x, int x_stride, u8* to, int tokens, int columns, int block_shift, int units) {
    constexpr int RUN = 4 * 8 / BITS, BYTES = unit_bytes(BITS, STRETCHES);
    const i64 number = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / PARTS, token = number / units;
    const int unit = int(number % units), part = threadIdx.x % PARTS;
    const bool there = token < tokens;
    float values[STRETCHES][RUN];
    u32 largest = 0;  // as bits: numbers without a sign are ordered as integers, those that are none last
    for (int s = 0; s < STRETCHES; ++s)
        for (int i = 0; i < RUN; ++i) {
            const int column = ((unit * STRETCHES + s) * PARTS + part) * RUN + i;
            values[s][i] = there && column < columns ? x[token * x_stride + column] : 0;
            const u32 bits = __float_as_uint(values[s][i]) & 0x7FFFFFFF;
            largest = bits > largest ? bits : largest;
        }
    const int threads = STRETCHES == 1 ? (1 << block_shift) / RUN : PARTS;  // of a block
    for (int distance = 1; distance < PARTS; distance *= 2) {
        const u32 other = __float_as_uint(__shfl_xor_sync(0xFFFFFFFF, __uint_as_float(largest), distance));
        if (distance < threads && other > largest) largest = other;
    }
    if (!there) return;
    const float most = __uint_as_float(largest);
    const bool finite = largest < 0x7F800000, tiny = most < 0x1p-100f;
    const float inverse = finite && !tiny ? __fdiv_rn(127.f, most) : 0;
    u8* out = to + (token * units + unit) * BYTES;
    int sum = 0;
    for (int s = 0; s < STRETCHES; ++s) {
        u32 words[8 / BITS] = {};
        for (int i = 0; i < RUN; ++i) {
            const float shifted = __fadd_rn(__fmul_rn(finite ? values[s][i] : 0, inverse), MAGIC_VALUE);
            const int code = int(__float_as_uint(shifted)) - MAGIC;
            const int word = BITS == 4 ? i % 2 : 0, byte = BITS == 4 ? i / 2 : i;
            words[word] |= u32(code & 0xFF) << 8 * byte;
            sum += code;
        }
        u32* codes = reinterpret_cast<u32*>(out + HEAD_BYTES + s * STRETCH * (8 / BITS));
        for (int word = 0; word < 8 / BITS; ++word) codes[word * PARTS + part] = words[word];
    }
    if (part % 2 == 0)
        reinterpret_cast<float*>(out)[part / 2] = !finite ? __uint_as_float(0x7FC00000) : tiny ? 0 : __fdiv_rn(most, 127.f);
    reinterpret_cast<int*>(out)[2 * THREADS_OF_A_ROW + part] = -sum;
}

#define QUANTISE(name, BITS, STRETCHES)                                                                                \
    extern "C" __global__ void name(const float* x, int x_stride, u8* to, int tokens, int columns, int block_shift,    \
                                    int units) {                                                                       \
        quantise<BITS, STRETCHES>(x, x_stride, to, tokens, columns, block_shift, units);                               \
    }

// By the bits of weights, and the stretches of a unit.
QUANTISE(quantise_int4_1, 4, 1)
QUANTISE(quantise_int4_2, 4, 2)
QUANTISE(quantise_int8_1, 8, 1)
QUANTISE(quantise_int8_2, 8, 2)
QUANTISE(quantise_int8_4, 8, 4)

// Rows of codes, as a share file has them; `zeros` may be null.
struct Codes {
    const u8* codes;
    const float* scales;
    const u8* zeros;
    int row_bytes, block_shift, blocks;  // a block has 2^block_shift bytes, a row so many blocks
};

// What a thread reads of a stretch.
struct Quarter {
    u32 words[4];
};

__device__ inline Quarter read_quarter(const u8* from) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    return {{four.x, four.y, four.z, four.w}};
}

// The same, where rows may be no multiple of it.
__device__ inline Quarter read_halves(const u8* from) {
    const u32* words = reinterpret_cast<const u32*>(from);
    return {{words[0], words[1], words[2], words[3]}};
}

// What a thread has of a row's unit. Where blocks are NARROW, it has two of them in a stretch.
template <int STRETCHES, bool NARROW>
struct Piece {
    static constexpr int BLOCKS = NARROW ? 2 : 1;
    Quarter codes[STRETCHES];
    float scales[BLOCKS];
};

// y[tokens, rows] of tokens that were quantised for it. A thread has TOKENS tokens at a time.
template <int BITS, int STRETCHES, bool NARROW, int TOKENS, bool ZEROS>
__device__ void products(const u8* x, int units, const Codes& m, const float* bias, float* y, int y_stride, int tokens,
                         int rows) {
    using Own = Piece<STRETCHES, NARROW>;
    constexpr int SUBS = 8 / BITS, BYTES = unit_bytes(BITS, STRETCHES), UNIT = STRETCHES * STRETCH;
    constexpr int ROWS_OF_A_WARP = WARP / THREADS_OF_A_ROW;
    const i64 groups = (tokens + TOKENS - 1) / TOKENS;
    const i64 first_token = warp_number() % groups * TOKENS, first_row = warp_number() / groups * ROWS_OF_A_WARP;
    if (first_row >= rows) return;  // a warp as a whole: its threads shuffle
    const i64 wanted_row = first_row + threadIdx.x % WARP / THREADS_OF_A_ROW;
    const i64 row = wanted_row < rows ? wanted_row : rows - 1;
    const int begin = 16 * (threadIdx.x % THREADS_OF_A_ROW);  // what a thread has of a stretch, in bytes
    const u8* const row_codes = m.codes + row * m.row_bytes + begin;
    const float* const row_scales = m.scales + row * m.blocks;
    const u8* activations[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        const i64 token = first_token + t < tokens ? first_token + t : tokens - 1;
        activations[t] = x + token * units * BYTES + begin;
    }
    float sums[TOKENS][4] = {};

    const auto multiply = [&](const Own& own, int unit, int offset) {  // a unit, so far behind `activations`
        int zeros[Own::BLOCKS];
        for (int i = 0; i < Own::BLOCKS; ++i) zeros[i] = 1 << (BITS - 1);
        if (ZEROS)
            for (int i = 0; i < Own::BLOCKS; ++i) {
                const int at = unit * UNIT + begin + 8 * i;
                const i64 block = row * m.blocks + (at >> m.block_shift);
                if (at < m.row_bytes) zeros[i] = BITS == 4 ? m.zeros[block / 2] >> 4 * (block % 2) & 0xF : m.zeros[block];
            }
        Quarter codes[STRETCHES][SUBS];
        for (int s = 0; s < STRETCHES; ++s)
            for (int p = 0; p < 4; ++p)
                for (int sub = 0; sub < SUBS; ++sub)
                    codes[s][sub].words[p] =
                        BITS == 4 ? own.codes[s].words[p] >> 4 * sub & 0x0F0F0F0F : own.codes[s].words[p];
        for (int t = 0; t < TOKENS; ++t) {
            const u8* token = activations[t] + offset;
            const Quarter firsts = read_quarter(token + 4 * 2 * THREADS_OF_A_ROW);
            int exact[4];
            for (int p = 0; p < 4; ++p) exact[p] = int(firsts.words[p]) * zeros[p * Own::BLOCKS / 4] + MAGIC;
            for (int s = 0; s < STRETCHES; ++s)
                for (int sub = 0; sub < SUBS; ++sub) {
                    const Quarter values = read_quarter(token + HEAD_BYTES + (s * SUBS + sub) * STRETCH);
                    for (int p = 0; p < 4; ++p) exact[p] = dot4(codes[s][sub].words[p], values.words[p], exact[p]);
                }
            const float* token_scales = reinterpret_cast<const float*>(token - begin / 2);
            float factors[Own::BLOCKS];
            for (int i = 0; i < Own::BLOCKS; ++i) factors[i] = own.scales[i] * token_scales[i];
            for (int p = 0; p < 4; ++p) {
                const float sum = __uint_as_float(u32(exact[p])) - MAGIC_VALUE;
                sums[t][p] = fmaf(sum, factors[p * Own::BLOCKS / 4], sums[t][p]);
            }
        }
    };

    // Units that all threads have whole, as many at a time as are under way.
    const int unit_blocks = UNIT >> m.block_shift ? UNIT >> m.block_shift : 1;
    const u8* from = row_codes;
    const float* scales = row_scales + (begin >> m.block_shift);
    Own ahead[UNITS_AHEAD];
    const auto fetch = [&](int slot) {
        for (int s = 0; s < STRETCHES; ++s) {
            const u8* stretch = from + slot * UNIT + s * STRETCH;
            ahead[slot].codes[s] = NARROW ? read_halves(stretch) : read_quarter(stretch);
        }
        for (int i = 0; i < Own::BLOCKS; ++i) ahead[slot].scales[i] = scales[slot * unit_blocks + i];
    };
    const int whole = m.row_bytes / UNIT / UNITS_AHEAD * UNITS_AHEAD;
    if (whole)
        for (int slot = 0; slot < UNITS_AHEAD; ++slot) fetch(slot);
    for (int unit = 0; unit < whole; unit += UNITS_AHEAD) {
        from += UNITS_AHEAD * UNIT, scales += UNITS_AHEAD * unit_blocks;
        const bool more = unit + UNITS_AHEAD < whole;
#pragma unroll  // or what is ahead would not be in registers
        for (int slot = 0; slot < UNITS_AHEAD; ++slot) {
            const Own own = ahead[slot];
            if (more) fetch(slot);
            multiply(own, unit + slot, slot * BYTES);
        }
        for (int t = 0; t < TOKENS; ++t) activations[t] += UNITS_AHEAD * BYTES;
    }
    // Those that are left; of the last one, some threads may have nothing.
#pragma unroll 1
    for (int unit = whole; unit < units; ++unit) {
        Own own = {};
        for (int s = 0; s < STRETCHES; ++s) {
            const int at = unit * UNIT + s * STRETCH;
            if (begin + at + 16 <= m.row_bytes) {
                own.codes[s] = NARROW ? read_halves(row_codes + at) : read_quarter(row_codes + at);
            } else if (NARROW && begin + at < m.row_bytes) {
                const u32* words = reinterpret_cast<const u32*>(row_codes + at);
                own.codes[s].words[0] = words[0], own.codes[s].words[1] = words[1];
            }
        }
        for (int i = 0; i < Own::BLOCKS; ++i) {
            const int at = unit * UNIT + begin + 8 * i;
            if (at < m.row_bytes) own.scales[i] = row_scales[at >> m.block_shift];
        }
        multiply(own, unit, (unit - whole) * BYTES);
    }
    for (int t = 0; t < TOKENS; ++t) {
        float total[4];
        for (int p = 0; p < 4; ++p) {  // parts that are 8 and then 4 apart are those of other threads
            total[p] = sums[t][p];
            total[p] += __shfl_xor_sync(0xFFFFFFFF, total[p], 2);
            total[p] += __shfl_xor_sync(0xFFFFFFFF, total[p], 1);
        }
        const float all = (total[0] + total[2]) + (total[1] + total[3]);
        if (begin == 0 && wanted_row < rows && first_token + t < tokens)
            y[(first_token + t) * y_stride + row] = all + (bias ? bias[row] : -0.f);
    }
}

#define PRODUCTS_OF(name, BITS, STRETCHES, NARROW, TOKENS, ZEROS)                                                      \
    extern "C" __global__ void name(const u8* x, int units, const u8* codes, const float* scales, const u8* zeros,     \
                                    const float* bias, float* y, int y_stride, int tokens, int rows, int row_bytes,    \
                                    int block_shift, int blocks) {                                                     \
        products<BITS, STRETCHES, NARROW, TOKENS, ZEROS>(                                                              \
            x, units, {codes, scales, zeros, row_bytes, block_shift, blocks}, bias, y, y_stride, tokens, rows);        \
    }

#define PRODUCTS(name, BITS, STRETCHES, NARROW)                                                                        \
    PRODUCTS_OF(name##_1, BITS, STRETCHES, NARROW, 1, false)                                                           \
    PRODUCTS_OF(name##_2, BITS, STRETCHES, NARROW, 2, false)                                                           \
    PRODUCTS_OF(name##_4, BITS, STRETCHES, NARROW, 4, false)                                                           \
    PRODUCTS_OF(name##_8, BITS, STRETCHES, NARROW, 8, false)                                                           \
    PRODUCTS_OF(name##_zeros_1, BITS, STRETCHES, NARROW, 1, true)                                                      \
    PRODUCTS_OF(name##_zeros_2, BITS, STRETCHES, NARROW, 2, true)                                                      \
    PRODUCTS_OF(name##_zeros_4, BITS, STRETCHES, NARROW, 4, true)                                                      \
    PRODUCTS_OF(name##_zeros_8, BITS, STRETCHES, NARROW, 8, true)

// By the bits of weights and the stretches of a unit, 0 where a block is half of what a thread reads of one; then by
// the tokens at a time.
PRODUCTS(products_int4_0, 4, 1, true)
PRODUCTS(products_int4_1, 4, 1, false)
PRODUCTS(products_int4_2, 4, 2, false)
PRODUCTS(products_int8_1, 8, 1, false)
PRODUCTS(products_int8_2, 8, 2, false)
PRODUCTS(products_int8_4, 8, 4, false)
