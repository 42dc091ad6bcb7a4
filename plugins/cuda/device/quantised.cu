// Products by 4- and 8-bit codes, of activations that are quantised to 8 bits first. The arithmetic, and so every bit of
// a result, is that of plugins/native/kernels/matmul.c, which states it; what it calls a lane is a *part* here. The products of several
// tokens are in tiles.cu.
//
// A row of weights is cut in stretches of 64 bytes, and these in pieces: of 16 bytes, or of 8 where blocks are as short. 16
// neighbouring threads have a row, and each of them every 16th piece, so a warp has two rows at a time, of several. The
// integers of a piece are added up from a magic number on, so that the bits of the sum are those of a float, 1.5 * 2^23 more
// than the sum.

constexpr int STRETCH = 64;           // bytes
constexpr int PARTS = 16;             // of a stretch, four bytes each; and threads that have a row
constexpr int SHORT_PIECES = 8;       // of a stretch
constexpr int LANE_ROWS = 2;          // of a product of one token, that a thread has
constexpr int MAGIC = 0x4B400000;     // the bits of...
constexpr float MAGIC_VALUE = 12582912.f;

// Bytes of a token's stretch: a scale and a first sum of each short piece, or twice of each piece, and codes. Of 4-bit
// weights the even elements come before its odd ones, as their codes are the lower and the upper halves of bytes. For tiles
// (tiles.cu) a stretch of 8 tokens is one: their scales of each piece, their first sums, and words of codes in the order of a
// warp's threads that have them, four words of each. Those of 32 tokens follow each other.
constexpr int HEAD_BYTES = 2 * 4 * SHORT_PIECES;
constexpr int TILE_TOKENS = 8, GROUP_TOKENS = 32;
__device__ constexpr int stretch_bytes(int bits) { return HEAD_BYTES + STRETCH * (8 / bits); }

// Quantises rows, f32[tokens, columns], for products, by tiles or not, to `stretches` of each token. 16 threads have a block of
// several, BLOCK_STRETCHES, or a stretch. A block has 2^block_shift columns. A block of threads has one token only.
template <int BITS, int BLOCK_STRETCHES, bool TILES>
__device__ void quantise(const RowSource& source, u8* to, int columns, int block_shift, int stretches) {
    constexpr int RUN = 4 * 8 / BITS, BYTES = stretch_bytes(BITS);
    const int of_a_token = stretches / BLOCK_STRETCHES, of_threads = int(blockDim.x) / PARTS;
    const int parts = (of_a_token + of_threads - 1) / of_threads, part = threadIdx.x % PARTS;
    const int number = int(blockIdx.x % parts) * of_threads + int(threadIdx.x) / PARTS, first = number * BLOCK_STRETCHES;
    const i64 token = blockIdx.x / parts;
    const bool there = number < of_a_token;
    const Norming norming = source.norming(token);
    float values[BLOCK_STRETCHES][RUN];
    u32 largest = 0;  // as bits, see Int8Scale
    for (int s = 0; s < BLOCK_STRETCHES; ++s) {
        const int column = ((first + s) * PARTS + part) * RUN;
        if (there && column < columns) {
            source.read<RUN>(token, column, norming, values[s]);
        } else {
            for (int i = 0; i < RUN; ++i) values[s][i] = 0;
        }
        for (int i = 0; i < RUN; ++i) {
            const u32 bits = __float_as_uint(values[s][i]) & 0x7FFFFFFF;
            largest = bits > largest ? bits : largest;
        }
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
        constexpr int TOGETHER = TILES ? TILE_TOKENS : 1, GROUP = TILES ? GROUP_TOKENS : 1;
        const int own = int(token % TOGETHER), before = int(token % GROUP) - own;
        u8* out = to + ((token / GROUP * stretches + first + s) * GROUP + before) * BYTES;
        u32* codes = reinterpret_cast<u32*>(out + TOGETHER * HEAD_BYTES);
        for (int word = 0; word < 8 / BITS; ++word) {
            const int of_a_thread = part / 4 * (8 / BITS) + word;
            codes[TILES ? (of_a_thread / 4 * WARP + own * 4 + part % 4) * 4 + of_a_thread % 4 : word * PARTS + part] =
                words[word];
        }
        const int of_a_piece = TILES && threads > 2 ? 4 : 2;
        if (part % of_a_piece) continue;
        const int piece = part / of_a_piece;
        reinterpret_cast<float*>(out)[piece * TOGETHER + own] = by.scale;
        reinterpret_cast<int*>(out)[(SHORT_PIECES + piece) * TOGETHER + own] = -int(sum);
    }
}

#define QUANTISE_FOR(name, BITS, BLOCK_STRETCHES, TILES)                                                               \
    extern "C" __global__ void name(RowSource source, u8* to, int columns, int block_shift, int stretches) {              \
        wait_for_previous();                                                                                           \
        quantise<BITS, BLOCK_STRETCHES, TILES>(source, to, columns, block_shift, stretches);                           \
    }

#define QUANTISE(name, BITS, BLOCK_STRETCHES)                                                                          \
    QUANTISE_FOR(name, BITS, BLOCK_STRETCHES, false)                                                                   \
    QUANTISE_FOR(name##_tiles, BITS, BLOCK_STRETCHES, true)

// By the bits of weights, and the stretches of a block.

// Rows of codes, as a share file has them; `zeros` may be null.
struct Codes {
    const u8* codes;
    const float* scales;
    const u8* zeros;
    int row_bytes, block_shift, blocks;  // a block has 2^block_shift bytes, a row so many blocks
};

// A piece of codes or of activations.
template <int WORDS>
struct Piece {
    u32 words[WORDS];
};

// Of activations, which all rows read.
__device__ inline void read_piece(const u8* from, Piece<4>& to) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to = {{four.x, four.y, four.z, four.w}};
}
__device__ inline void read_piece(const u8* from, Piece<2>& to) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    to = {{two.x, two.y}};
}

// Of codes.
__device__ inline void read_piece_once(const u8* from, Piece<4>& to) {
    const uint4 four = read_once(from);
    to = {{four.x, four.y, four.z, four.w}};
}
__device__ inline void read_piece_once(const u8* from, Piece<2>& to) { read_piece(from, to); }

// y[tokens, rows] of tokens that were quantised for it, of which `sharing` are the same. A thread has a token and LANE_ROWS
// rows at a time, and the codes of AHEAD pieces of each row under way.
template <int BITS, bool SHORT, bool ZEROS, int AHEAD>
__device__ void products(const u8* x, int stretches, int sharing, const Codes& m, const float* bias, float* y, int y_stride,
                         int tokens, int rows) {
    constexpr int SUBS = 8 / BITS, BYTES = stretch_bytes(BITS), PIECE = SHORT ? 8 : 16, WORDS = PIECE / 4;
    constexpr int ROUND = PARTS * PIECE;  // bytes of a row that its threads have together
    constexpr int ROWS = LANE_ROWS;
    const i64 token = warp_number() % tokens;
    const i64 first_row = warp_number() / tokens * (WARP / PARTS * ROWS) + threadIdx.x % WARP / PARTS * ROWS;
    if (first_row - threadIdx.x % WARP / PARTS * ROWS >= rows) return;  // a warp as a whole: its threads shuffle
    const int thread = threadIdx.x % PARTS, begin = thread * PIECE;
    const auto row_of = [&](int r) { return first_row + r < rows ? first_row + r : rows - 1; };
    const u8* activations = x + (token / sharing * stretches + begin / STRETCH) * BYTES;
    float sums[ROWS] = {}, scales[AHEAD][ROWS];
    int zeros[AHEAD][ROWS];
    Piece<WORDS> pieces[AHEAD][ROWS];
    const auto read_ahead = [&](int a, int at) {
        if (at >= m.row_bytes) return;
        for (int r = 0; r < ROWS; ++r) {
            const i64 block = row_of(r) * m.blocks + (at >> m.block_shift);
            read_piece_once(m.codes + row_of(r) * m.row_bytes + at, pieces[a][r]);
            scales[a][r] = m.scales[block];
            zeros[a][r] = !ZEROS ? 1 << (BITS - 1) : BITS == 4 ? m.zeros[block / 2] >> 4 * (block % 2) & 0xF : m.zeros[block];
        }
    };
#pragma unroll  // or what is ahead would not be in registers
    for (int a = 0; a < AHEAD; ++a) read_ahead(a, begin + a * ROUND);  // before there is what it is multiplied by
    wait_for_previous();
    for (int tile = begin; tile < m.row_bytes; tile += AHEAD * ROUND) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int at = tile + a * ROUND;
            if (at >= m.row_bytes) break;
            Piece<WORDS> codes[ROWS][SUBS];
            float own_scales[ROWS];
            int own_zeros[ROWS];
            for (int r = 0; r < ROWS; ++r) {
                own_scales[r] = scales[a][r], own_zeros[r] = zeros[a][r];
                for (int sub = 0; sub < SUBS; ++sub)
                    for (int w = 0; w < WORDS; ++w) {
                        const u32 word = pieces[a][r].words[w];
                        codes[r][sub].words[w] = BITS == 4 ? word >> 4 * sub & 0x0F0F0F0F : word;
                    }
            }
            read_ahead(a, at + AHEAD * ROUND);
            const u8* stretch = activations + a * (ROUND / STRETCH * BYTES);
            const float scale = reinterpret_cast<const float*>(stretch)[begin % STRETCH / 8];
            const int first = reinterpret_cast<const int*>(stretch)[SHORT_PIECES + begin % STRETCH / 8];
            Piece<WORDS> values[SUBS];
            for (int sub = 0; sub < SUBS; ++sub)
                read_piece(stretch + HEAD_BYTES + sub * STRETCH + begin % STRETCH, values[sub]);
            for (int r = 0; r < ROWS; ++r) {
                int exact = first * own_zeros[r] + MAGIC;
                for (int sub = 0; sub < SUBS; ++sub)
                    for (int w = 0; w < WORDS; ++w) exact = dot4(codes[r][sub].words[w], values[sub].words[w], exact);
                const float number = __uint_as_float(u32(exact)) - MAGIC_VALUE;
                sums[r] = fmaf(number, own_scales[r] * scale, sums[r]);
            }
        }
        activations += AHEAD * (ROUND / STRETCH * BYTES);
    }
    for (int r = 0; r < ROWS; ++r) {
        float total = sums[r];
        for (int distance = PARTS / 2; distance; distance /= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, distance);
        const i64 row = first_row + r;
        if (thread == 0 && row < rows) y[token * y_stride + row] = total + (bias ? bias[row] : 0.f);
    }
}

// The pieces of a row under way; more where a matrix has so few rows that a GPU could have more warps.
__device__ constexpr int ahead_of(int bits) { return bits == 8 ? 3 : 2; }
constexpr int AHEAD_OF_NARROW = 4;

#define PRODUCTS_OF(name, BITS, SHORT, ZEROS, AHEAD)                                                                   \
    extern "C" __global__ void name(const u8* x, int stretches, const u8* codes, const float* scales, const u8* zeros, \
                                    const float* bias, float* y, int y_stride, int tokens, int rows, int row_bytes,    \
                                    int block_shift, int blocks) {                                                     \
        products<BITS, SHORT, ZEROS, AHEAD>(                                                                           \
            x, stretches, 1, {codes, scales, zeros, row_bytes, block_shift, blocks}, bias, y, y_stride, tokens, rows); \
    }

// By the bits of weights, whether pieces are short and zeros given.
#define PRODUCTS(name, BITS, SHORT, ZEROS)                                                                             \
    PRODUCTS_OF(name, BITS, SHORT, ZEROS, ahead_of(BITS)) PRODUCTS_OF(name##_narrow, BITS, SHORT, ZEROS, AHEAD_OF_NARROW)

// As PRODUCTS_OF and MATMUL_OF for one token at a time, of `sharing` that a row of x has: each is multiplied by the matrix
// that it has chosen.
#define EXPERT_PRODUCTS(name, BITS, SHORT, ZEROS)                                                                      \
    extern "C" __global__ void name(const u8* x, int stretches, int sharing, const ExpertMatrix* experts,              \
                                    const int* chosen, float* y, int y_stride, int tokens, int rows, int row_bytes,    \
                                    int block_shift, int blocks) {                                                     \
        wait_for_previous();                                                                                           \
        const ExpertMatrix own = experts[chosen[warp_number() % tokens]];                                              \
        const Codes codes = {reinterpret_cast<const u8*>(floats_at(own.weights)), floats_at(own.scales),               \
                             reinterpret_cast<const u8*>(floats_at(own.zeros)), row_bytes, block_shift, blocks};       \
        products<BITS, SHORT, ZEROS, ahead_of(BITS)>(x, stretches, sharing, codes,                                     \
                                                     own.bias ? floats_at(own.bias) : nullptr, y, y_stride, tokens,    \
                                                     rows);                                                            \
    }

