// Products by 4- and 8-bit codes, of activations that are quantised to 8 bits first. The arithmetic, and so every bit of
// a result, is that of plugins/native/matmul.c, which states it; what it calls a lane is a *part* here.
//
// A row of weights is cut in stretches of 64 bytes. Four neighbouring threads have a row: each reads 16 bytes of a stretch
// at once, which are a piece, or two short ones, and a warp has eight rows. Codes of the next stretches are under way while
// those of one are multiplied. The integers of a piece are added up from a magic number on, so that the bits of the sum are
// those of a float, 1.5 * 2^23 more than the sum.

constexpr int STRETCH = 64;           // bytes
constexpr int PARTS = 16;             // of a stretch, four bytes each
constexpr int THREADS_OF_A_ROW = 4;   // each has four parts
constexpr int SHORT_PIECES = 8;       // of a stretch
constexpr int STRETCHES_AHEAD = 4;    // whose codes a thread has under way
constexpr int LANES = 4;              // that a thread has of a row's 16
constexpr int MAGIC = 0x4B400000;     // the bits of...
constexpr float MAGIC_VALUE = 12582912.f;

// Bytes of a token's stretch: a scale and a first sum of each short piece, or twice of each piece, and codes. Of 4-bit
// weights the even elements come before its odd ones, as their codes are the lower and the upper halves of bytes.
constexpr int HEAD_BYTES = 2 * 4 * SHORT_PIECES;
__device__ constexpr int stretch_bytes(int bits) { return HEAD_BYTES + STRETCH * (8 / bits); }

// Quantises x: f32[tokens, columns] for `products` below, to `stretches` of each token. 16 threads have a block of several,
// BLOCK_STRETCHES, or a stretch. A block has 2^block_shift columns.
template <int BITS, int BLOCK_STRETCHES>
__device__ void quantise(const float* x, int x_stride, u8* to, int tokens, int columns, int block_shift, int stretches) {
    constexpr int RUN = 4 * 8 / BITS, BYTES = stretch_bytes(BITS);
    const i64 number = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / PARTS, of_a_token = stretches / BLOCK_STRETCHES;
    const i64 token = number / of_a_token;
    const int first = int(number % of_a_token) * BLOCK_STRETCHES, part = threadIdx.x % PARTS;
    const bool there = token < tokens;
    float values[BLOCK_STRETCHES][RUN];
    u32 largest = 0;  // as bits, see Int8Scale
    for (int s = 0; s < BLOCK_STRETCHES; ++s)
        for (int i = 0; i < RUN; ++i) {
            const int column = ((first + s) * PARTS + part) * RUN + i;
            values[s][i] = there && column < columns ? x[token * x_stride + column] : 0;
            const u32 bits = __float_as_uint(values[s][i]) & 0x7FFFFFFF;
            largest = bits > largest ? bits : largest;
        }
    const int threads = BLOCK_STRETCHES == 1 ? (1 << block_shift) / RUN : PARTS;  // of a block
    for (int distance = 1; distance < PARTS; distance *= 2) {
        const u32 other = __float_as_uint(__shfl_xor_sync(0xFFFFFFFF, __uint_as_float(largest), distance));
        if (distance < threads && other > largest) largest = other;
    }
    const Int8Scale by(largest);
    for (int s = 0; s < BLOCK_STRETCHES; ++s) {
        u32 words[8 / BITS] = {};
        float sum = 0;  // a whole number
        for (int i = 0; i < RUN; ++i) {
            const float shifted = __fadd_rn(__fmul_rn(by.finite ? values[s][i] : 0, by.inverse), MAGIC_VALUE);
            const int code = int(__float_as_uint(shifted)) - MAGIC;
            const int word = BITS == 4 ? i % 2 : 0, byte = BITS == 4 ? i / 2 : i;
            words[word] |= u32(code & 0xFF) << 8 * byte;
            sum += float(code);
        }
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        const float other = __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        if (threads > 2) sum += other;
        if (!there) continue;
        u8* out = to + (token * stretches + first + s) * BYTES;
        u32* codes = reinterpret_cast<u32*>(out + HEAD_BYTES);
        for (int word = 0; word < 8 / BITS; ++word) codes[word * PARTS + part] = words[word];
        if (part % 2) continue;
        reinterpret_cast<float*>(out)[part / 2] = by.scale;
        reinterpret_cast<int*>(out)[SHORT_PIECES + part / 2] = -int(sum);
    }
}

#define QUANTISE(name, BITS, BLOCK_STRETCHES)                                                                          \
    extern "C" __global__ void name(const float* x, int x_stride, u8* to, int tokens, int columns, int block_shift,    \
                                    int stretches) {                                                                   \
        quantise<BITS, BLOCK_STRETCHES>(x, x_stride, to, tokens, columns, block_shift, stretches);                     \
    }

// By the bits of weights, and the stretches of a block.
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

// What a thread has of a row's stretch. Where pieces are SHORT, it has two of them.
template <bool SHORT>
struct Part {
    static constexpr int PIECES = SHORT ? 2 : 1;
    Quarter codes;
    float scales[PIECES];
};

// y[tokens, rows] of tokens that were quantised for it. A thread has TOKENS tokens at a time.
template <int BITS, bool SHORT, int TOKENS, bool ZEROS>
__device__ void products(const u8* x, int stretches, const Codes& m, const float* bias, float* y, int y_stride, int tokens,
                         int rows) {
    using Own = Part<SHORT>;
    constexpr int SUBS = 8 / BITS, BYTES = stretch_bytes(BITS), PIECES = Own::PIECES;
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
        activations[t] = x + token * stretches * BYTES + begin;
    }
    float sums[TOKENS][LANES] = {};

    // A stretch, so far behind `activations`; the number that it has among as many as have pieces of different lanes.
    const auto multiply = [&](const Own& own, int stretch, int offset, int number) {
        int zeros[PIECES];
        for (int i = 0; i < PIECES; ++i) zeros[i] = 1 << (BITS - 1);
        if (ZEROS)
            for (int i = 0; i < PIECES; ++i) {
                const int at = stretch * STRETCH + begin + 8 * i;
                const i64 block = row * m.blocks + (at >> m.block_shift);
                if (at < m.row_bytes) zeros[i] = BITS == 4 ? m.zeros[block / 2] >> 4 * (block % 2) & 0xF : m.zeros[block];
            }
        Quarter codes[SUBS];
        for (int p = 0; p < 4; ++p)
            for (int sub = 0; sub < SUBS; ++sub)
                codes[sub].words[p] = BITS == 4 ? own.codes.words[p] >> 4 * sub & 0x0F0F0F0F : own.codes.words[p];
        for (int t = 0; t < TOKENS; ++t) {
            const u8* token = activations[t] + offset;
            const float* scales = reinterpret_cast<const float*>(token - begin / 2);
            const int* firsts = reinterpret_cast<const int*>(scales + SHORT_PIECES);
            int exact[PIECES];
            for (int i = 0; i < PIECES; ++i) exact[i] = firsts[i] * zeros[i] + MAGIC;
            for (int sub = 0; sub < SUBS; ++sub) {
                const Quarter values = read_quarter(token + HEAD_BYTES + sub * STRETCH);
                for (int p = 0; p < 4; ++p) {
                    int& sum = exact[p * PIECES / 4];
                    sum = dot4(codes[sub].words[p], values.words[p], sum);
                }
            }
            for (int i = 0; i < PIECES; ++i) {
                float& lane = sums[t][(number * PIECES + i) % LANES];
                lane = fmaf(__uint_as_float(u32(exact[i])) - MAGIC_VALUE, own.scales[i] * scales[i], lane);
            }
        }
    };

    // Stretches that all threads have whole, as many at a time as are under way.
    Own ahead[STRETCHES_AHEAD];
    const auto fetch = [&](int stretch, int slot) {
        const int at = stretch * STRETCH;
        ahead[slot].codes = SHORT ? read_halves(row_codes + at) : read_quarter(row_codes + at);
        for (int i = 0; i < PIECES; ++i) ahead[slot].scales[i] = row_scales[(at + begin + 8 * i) >> m.block_shift];
    };
    const int whole = m.row_bytes / STRETCH / STRETCHES_AHEAD * STRETCHES_AHEAD;
    if (whole)
        for (int slot = 0; slot < STRETCHES_AHEAD; ++slot) fetch(slot, slot);
    for (int stretch = 0; stretch < whole; stretch += STRETCHES_AHEAD) {
        const int next = stretch + STRETCHES_AHEAD;
#pragma unroll  // or what is ahead would not be in registers
        for (int slot = 0; slot < STRETCHES_AHEAD; ++slot) {
            const Own own = ahead[slot];
            if (next < whole) fetch(next + slot, slot);
            multiply(own, stretch + slot, slot * BYTES, slot);
        }
        for (int t = 0; t < TOKENS; ++t) activations[t] += STRETCHES_AHEAD * BYTES;
    }
    // Those that are left; of the last one, some threads may have nothing.
#pragma unroll  // or sums would not be in registers
    for (int slot = 0; slot < STRETCHES_AHEAD; ++slot) {
        const int at = (whole + slot) * STRETCH;
        if (whole + slot >= stretches) break;
        Own own = {};
        if (begin + at + 16 <= m.row_bytes) {
            own.codes = SHORT ? read_halves(row_codes + at) : read_quarter(row_codes + at);
        } else if (SHORT && begin + at < m.row_bytes) {
            const u32* words = reinterpret_cast<const u32*>(row_codes + at);
            own.codes.words[0] = words[0], own.codes.words[1] = words[1];
        }
        for (int i = 0; i < PIECES; ++i)
            if (at + begin + 8 * i < m.row_bytes) own.scales[i] = row_scales[(at + begin + 8 * i) >> m.block_shift];
        multiply(own, whole + slot, slot * BYTES, slot);
    }
    for (int t = 0; t < TOKENS; ++t) {
        float total[2] = {sums[t][0] + sums[t][2], sums[t][1] + sums[t][3]};  // of lanes that are 8 apart
        if (!SHORT) total[0] += total[1];                                     // 4 apart
        for (int i = 0; i < PIECES; ++i) {  // those that are left: of other threads, then of this one
            total[i] += __shfl_xor_sync(0xFFFFFFFF, total[i], 2);
            total[i] += __shfl_xor_sync(0xFFFFFFFF, total[i], 1);
        }
        const float all = SHORT ? total[0] + total[1] : total[0];
        if (begin == 0 && wanted_row < rows && first_token + t < tokens)
            y[(first_token + t) * y_stride + row] = all + (bias ? bias[row] : 0.f);
    }
}

#define PRODUCTS_OF(name, BITS, SHORT, TOKENS, ZEROS)                                                                  \
    extern "C" __global__ void name(const u8* x, int stretches, const u8* codes, const float* scales, const u8* zeros, \
                                    const float* bias, float* y, int y_stride, int tokens, int rows, int row_bytes,    \
                                    int block_shift, int blocks) {                                                     \
        products<BITS, SHORT, TOKENS, ZEROS>(                                                                          \
            x, stretches, {codes, scales, zeros, row_bytes, block_shift, blocks}, bias, y, y_stride, tokens, rows);    \
    }

#define PRODUCTS(name, BITS, SHORT)                                                                                    \
    PRODUCTS_OF(name##_1, BITS, SHORT, 1, false)                                                                       \
    PRODUCTS_OF(name##_2, BITS, SHORT, 2, false)                                                                       \
    PRODUCTS_OF(name##_4, BITS, SHORT, 4, false)                                                                       \
    PRODUCTS_OF(name##_8, BITS, SHORT, 8, false)                                                                       \
    PRODUCTS_OF(name##_zeros_1, BITS, SHORT, 1, true)                                                                  \
    PRODUCTS_OF(name##_zeros_2, BITS, SHORT, 2, true)                                                                  \
    PRODUCTS_OF(name##_zeros_4, BITS, SHORT, 4, true)                                                                  \
    PRODUCTS_OF(name##_zeros_8, BITS, SHORT, 8, true)

// By the bits of weights and whether pieces are short; then by the tokens at a time.
PRODUCTS(products_int4_short, 4, true)
PRODUCTS(products_int4, 4, false)
PRODUCTS(products_int8, 8, false)
