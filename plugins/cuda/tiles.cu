// Products by codes of more than a few tokens, on tensor cores: in tiles of 16 rows by 8 tokens. The arithmetic is that of
// quantised.cu, and so is every bit: a piece is as many columns as one multiplication of tiles has, 32 or 16; its sums are
// exact integers, and those of a result become one of its 16 float sums piece by piece.
//
// A warp has every fourth stretch of its rows (every second where pieces are short), and of its results the sums of four
// (eight) parts, so a block's four warps read 256 neighbouring bytes of each row. What they read of codes and scales goes to
// memory that they share, several stretches ahead; activations are found in the first cache, as all blocks of a
// multiprocessor read the same. At the end the warps of the same results add up their sums, in the order of `products`.

constexpr int TILE_ROWS = 16, TILE_TOKENS = 8;
constexpr int BLOCK_WARPS = 4;
constexpr int UNIT = 16, UNITS = STRETCH / UNIT;  // bytes of a row that a tile has at a time, and how many a stretch has
constexpr int ROW_WORDS = STRETCH / 4 + 4;        // of a row of codes in shared memory: no two rows begin in the same bank
constexpr int PANEL = 256;                        // blocks of rows that all tokens have before others: caches hold their codes

// What a kernel is made for: the bits of weights, whether pieces are short and zeros given, and the tiles of a warp.
template <int BITS_, bool SHORT_, bool ZEROS_, int ROW_TILES_, int TOKEN_TILES_>
struct TileShape {
    static constexpr int BITS = BITS_, ROW_TILES = ROW_TILES_, TOKEN_TILES = TOKEN_TILES_;
    static constexpr bool SHORT = SHORT_, ZEROS = ZEROS_;
    static constexpr int SUBS = 8 / BITS;                           // words of activations for a word of codes
    static constexpr int PIECES = SHORT ? 8 : 4;                    // of a stretch
    static constexpr int CLASSES = PARTS / PIECES;                  // of stretches: a warp has those of one
    static constexpr int ROWS = ROW_TILES * TILE_ROWS;              // of a warp
    static constexpr int TOKENS = TOKEN_TILES * TILE_TOKENS;        // of a block
    static constexpr int BLOCK_ROWS = ROWS * BLOCK_WARPS / CLASSES;
    static constexpr int STAGES = ROW_TILES == 1 ? 4 : 3;           // stretches under way
    static constexpr int SUMS = ROW_TILES * TOKEN_TILES * PIECES * 4;  // of a thread
    static constexpr bool FIRSTS = BITS == 8 && ZEROS;  // a code less its zero is no byte, but a code less 128 is
    // Codes of 4 bits less 8 are multiplied by 16: so they need not be moved within their bytes.
    static constexpr bool SIXTEENFOLD = BITS == 4 && !ZEROS;
};

// A stretch of a warp's rows, on its way.
template <class Shape>
struct alignas(16) Stage {
    u32 codes[Shape::ROWS][ROW_WORDS];
    float scales[Shape::ROWS][Shape::PIECES];
};

template <class Shape>
union TileMemory {
    Stage<Shape> stages[BLOCK_WARPS][Shape::STAGES];
    float sums[BLOCK_WARPS / 2][Shape::SUMS][WARP];  // those of warps that are done
};

// What a thread has of a stretch of the tokens' activations. There is memory for whole tiles of tokens, whatever lies there.
template <class Shape>
struct Activations {
    u32 words[Shape::TOKEN_TILES][UNITS * Shape::SUBS];
    float scales[Shape::TOKEN_TILES][2][Shape::PIECES];
    float firsts[Shape::TOKEN_TILES][2][Shape::PIECES];  // the bits of integers

    // `x` is the stretch of the block's first token; `next` bytes on is that of the next one.
    __device__ void read(const u8* x, int next) {
        const int lane = threadIdx.x % WARP, group = lane / 4, member = lane % 4;
        const u8* codes = x + group * next + HEAD_BYTES + member * (UNITS * Shape::SUBS * 4);
        const u8* heads = x + 2 * member * next;
#pragma unroll
        for (int n = 0; n < Shape::TOKEN_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < UNITS * Shape::SUBS; i += 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(codes + n * TILE_TOKENS * next + 4 * i);
                words[n][i] = four.x, words[n][i + 1] = four.y, words[n][i + 2] = four.z, words[n][i + 3] = four.w;
            }
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                const float* head = reinterpret_cast<const float*>(heads + (n * TILE_TOKENS + own) * next);
                read_run<Shape::PIECES>(head, scales[n][own]);
                if (Shape::FIRSTS) read_run<Shape::PIECES>(head + SHORT_PIECES, firsts[n][own]);
            }
        }
    }
};

// Begins to copy a stretch of a warp's rows: zeros behind the end of a row, and the last row where there are no more.
template <class Shape>
__device__ void fetch(Stage<Shape>& stage, const Codes& m, int first_row, int rows, int stretch) {
    constexpr int PIECE = STRETCH / Shape::PIECES, STEP = WARP / Shape::PIECES;
    const int lane = threadIdx.x % WARP, piece = lane % Shape::PIECES, at = stretch * STRETCH + piece * PIECE;
    const bool there = at < m.row_bytes;
#pragma unroll
    for (int i = 0; i < Shape::ROWS; i += STEP) {
        const int row = i + lane / Shape::PIECES, own = first_row + row < rows ? first_row + row : rows - 1;
        const int from = own * m.row_bytes + (there ? at : 0);
        copy_async<PIECE>(&stage.codes[row][piece * (PIECE / 4)], m.codes + from, there);
        copy_async<4>(&stage.scales[row][piece], m.scales + (from >> m.block_shift), there);
    }
}

// The zeros that a thread needs of a stretch: of each row, a byte for each unit.
template <class Shape>
struct Zeros {
    u32 bytes[Shape::ROW_TILES][2];

    // `first` is the number of the first row's first block in `m.zeros`.
    __device__ void read(const Codes& m, int first, int first_row, int rows, int stretch) {
        if (!Shape::SHORT && 1 << m.block_shift >= STRETCH) {
            read_units<1>(m, first, first_row, rows, stretch);
        } else {
            read_units<UNITS>(m, first, first_row, rows, stretch);
        }
    }

    // Where the first COUNT units have one each, and the others that of the first.
    template <int COUNT>
    __device__ void read_units(const Codes& m, int first, int first_row, int rows, int stretch) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < Shape::ROW_TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + i * TILE_ROWS + half * 8 + lane / 4, own = row < rows ? row : rows - 1;
                bytes[i][half] = 0;
#pragma unroll
                for (int unit = 0; unit < COUNT; ++unit) {
                    const int at = stretch * STRETCH + unit * UNIT + (Shape::SHORT ? lane % 4 / 2 * 8 : 0);
                    const int block = first + (own * m.row_bytes + (at < m.row_bytes ? at : 0) >> m.block_shift);
                    const u32 zero = Shape::BITS == 4 ? m.zeros[block / 2] >> 4 * (block % 2) & 0xF : m.zeros[block];
                    bytes[i][half] |= zero << 8 * unit;
                }
                if (COUNT == 1) bytes[i][half] *= 0x01010101;
            }
    }
};

// Four codes of a row, less their zero (which is in each byte of `zeros`), as signed bytes: the lower halves of a word's bytes,
// or the upper ones, or all. Codes of 8 bits are less 128.
template <class Shape>
__device__ inline u32 signed_codes(u32 word, bool upper, u32 zeros) {
    if (Shape::BITS == 8) return word ^ 0x80808080;
    if (Shape::SIXTEENFOLD) {
        const u32 less_eight = word ^ 0x88888888;
        return (upper ? less_eight : less_eight << 4) & 0xF0F0F0F0;
    }
    return (((upper ? word >> 4 : word) & 0x0F0F0F0F | 0x80808080) - zeros) ^ 0x80808080;
}

// Adds a stretch to the sums of a warp's results. What is behind the end of a row adds 0 by scales of 0.
template <class Shape>
__device__ void multiply_stretch(float (&sums)[Shape::ROW_TILES][Shape::TOKEN_TILES][Shape::PIECES][4],
                                 const Stage<Shape>& stage, const Activations<Shape>& x, const Zeros<Shape>& zeros) {
    constexpr int HALVES = Shape::SHORT ? 2 : 1, SUBS = Shape::SUBS;
    const int lane = threadIdx.x % WARP, group = lane / 4, member = lane % 4;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int i = 0; i < Shape::ROW_TILES; ++i) {
            u32 a[2 * SUBS];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 word = stage.codes[i * TILE_ROWS + half * 8 + group][unit * 4 + member];
                const u32 own = Shape::ZEROS ? __byte_perm(zeros.bytes[i][half], 0, 0x1111 * unit) : 0;
#pragma unroll
                for (int sub = 0; sub < SUBS; ++sub) a[2 * sub + half] = signed_codes<Shape>(word, sub > 0, own);
            }
#pragma unroll
            for (int part = 0; part < HALVES; ++part) {
                const int piece = unit * HALVES + part, row = i * TILE_ROWS + group;
                const float scales[2] = {stage.scales[row][piece], stage.scales[row + 8][piece]};
                u32 own[2 * SUBS];
#pragma unroll
                for (int word = 0; word < 2 * SUBS; ++word) own[word] = !Shape::SHORT || member / 2 == part ? a[word] : 0;
#pragma unroll
                for (int n = 0; n < Shape::TOKEN_TILES; ++n) {
                    u32 b[SUBS];
#pragma unroll
                    for (int sub = 0; sub < SUBS; ++sub) b[sub] = x.words[n][unit * SUBS + sub];
                    int begin[4], exact[4];
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        begin[c] = MAGIC;
                        if constexpr (Shape::FIRSTS) {
                            const int zero = int(zeros.bytes[i][c / 2] >> 8 * unit & 0xFF) - 128;
                            begin[c] += int(__float_as_uint(x.firsts[n][c % 2][piece])) * zero;
                        }
                    }
                    multiply_tiles<SUBS>(exact, own, b, begin);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const float shifted = __uint_as_float(u32(exact[c]));
                        const float number = Shape::SIXTEENFOLD ? fmaf(shifted, 1.f / 16, -MAGIC_VALUE / 16)
                                                                : shifted - MAGIC_VALUE;
                        sums[i][n][piece][c] =
                            fmaf(number, scales[c / 2] * x.scales[n][c % 2][piece], sums[i][n][piece][c]);
                    }
                }
            }
        }
}

// y[tokens, rows] of tokens that were quantised for tiles.
template <class Shape>
__device__ void tile_products(const u8* x, int stretches, Codes m, const float* bias, float* y, int y_stride, int tokens,
                              int rows) {
    constexpr int CLASSES = Shape::CLASSES, STAGES = Shape::STAGES, BYTES = stretch_bytes(Shape::BITS);
    TileMemory<Shape>& memory = shared_memory<TileMemory<Shape>>();
    const int warp = threadIdx.x / WARP, of_class = warp % CLASSES, lane = threadIdx.x % WARP;
    const int rows_before = CLASSES == BLOCK_WARPS ? 0 : warp / CLASSES;  // warps of the block that have other rows
    // Blocks of a panel of rows: all rows of some tokens, then of the next ones.
    const int row_blocks = (rows + Shape::BLOCK_ROWS - 1) / Shape::BLOCK_ROWS;
    const int groups = (tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    const int panel = int(blockIdx.x) / (PANEL * groups), in_panel = int(blockIdx.x) % (PANEL * groups);
    const int wide = row_blocks - panel * PANEL < PANEL ? row_blocks - panel * PANEL : PANEL;
    // From here on, rows and tokens are counted from the block's first ones.
    const i64 skipped_rows = i64(panel * PANEL + in_panel % wide) * Shape::BLOCK_ROWS;
    const i64 skipped_tokens = i64(in_panel / wide) * Shape::TOKENS, first_block = skipped_rows * m.blocks;
    m.codes += skipped_rows * m.row_bytes, m.scales += first_block, m.zeros += first_block / (8 / Shape::BITS);
    rows -= int(skipped_rows);
    x += skipped_tokens * stretches * BYTES, tokens -= int(skipped_tokens);
    y += skipped_tokens * y_stride + skipped_rows;
    const int first_row = rows_before * Shape::ROWS, next_token = stretches * BYTES;
    const int first_zero = int(first_block % (8 / Shape::BITS));  // in the first byte of zeros

    float sums[Shape::ROW_TILES][Shape::TOKEN_TILES][Shape::PIECES][4] = {};
    Stage<Shape>(&stages)[STAGES] = memory.stages[warp];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (of_class + i * CLASSES < stretches) fetch<Shape>(stages[i], m, first_row, rows, of_class + i * CLASSES);
        commit_copies();
    }
    // Few tokens are a stretch ahead; for more there are no registers.
    constexpr bool AHEAD = Shape::TOKEN_TILES <= 2;
    Activations<Shape> now;
    if (AHEAD && of_class < stretches) now.read(x + of_class * BYTES, next_token);
    int stage = 0;
    for (int stretch = of_class; stretch < stretches; stretch += CLASSES) {
        Activations<Shape> next;
        Zeros<Shape> zeros;
        if (Shape::ZEROS) zeros.read(m, first_zero, first_row, rows, stretch);
        if (AHEAD) next.read(x + (stretch + CLASSES < stretches ? stretch + CLASSES : stretch) * BYTES, next_token);
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // all lanes' copies are there, and the stage before is read
        const int ahead = stretch + (STAGES - 1) * CLASSES;
        if (ahead < stretches) fetch<Shape>(stages[stage ? stage - 1 : STAGES - 1], m, first_row, rows, ahead);
        commit_copies();
        if (!AHEAD) now.read(x + stretch * BYTES, next_token);
        multiply_stretch<Shape>(sums, stages[stage], now, zeros);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        if (AHEAD) now = next;
    }

    float* all = &sums[0][0][0][0];
    for (int half = CLASSES / 2; half; half /= 2) {
        const int slot = of_class % half + rows_before;
        __syncthreads();  // nobody reads what is overwritten
        if (of_class >= half && of_class < 2 * half)
#pragma unroll
            for (int i = 0; i < Shape::SUMS; ++i) memory.sums[slot][i][lane] = all[i];
        __syncthreads();
        if (of_class < half)
#pragma unroll
            for (int i = 0; i < Shape::SUMS; ++i) all[i] += memory.sums[slot][i][lane];
    }
    if (of_class) return;
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES; ++i)
#pragma unroll
        for (int n = 0; n < Shape::TOKEN_TILES; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float(&parts)[Shape::PIECES][4] = sums[i][n];
#pragma unroll
                for (int distance = Shape::PIECES / 2; distance; distance /= 2)
#pragma unroll
                    for (int piece = 0; piece < distance; ++piece) parts[piece][c] += parts[piece + distance][c];
                const int row = first_row + i * TILE_ROWS + c / 2 * 8 + lane / 4;
                const int token = n * TILE_TOKENS + lane % 4 * 2 + c % 2;
                if (row < rows && token < tokens)
                    y[i64(token) * y_stride + row] = parts[0][c] + (bias ? bias[skipped_rows + row] : 0.f);
            }
}

#define TILE_PRODUCTS_OF(name, BITS, SHORT, ZEROS, ROW_TILES, TOKEN_TILES)                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * WARP, 2)                                                   \
        name(const u8* x, int stretches, const u8* codes, const float* scales, const u8* zeros, const float* bias,     \
             float* y, int y_stride, int tokens, int rows, int row_bytes, int block_shift, int blocks) {               \
        wait_for_previous();                                                                                           \
        tile_products<TileShape<BITS, SHORT, ZEROS, ROW_TILES, TOKEN_TILES>>(                                          \
            x, stretches, {codes, scales, zeros, row_bytes, block_shift, blocks}, bias, y, y_stride, tokens, rows);    \
    }

// By the bits of weights, whether pieces are short and zeros given; then by the rows and tokens of a warp, as many as there
// are registers for.
#define TILE_PRODUCTS(name, BITS, SHORT, ZEROS)                                                                        \
    TILE_PRODUCTS_OF(name##_16x8, BITS, SHORT, ZEROS, 1, 1)                                                            \
    TILE_PRODUCTS_OF(name##_16x16, BITS, SHORT, ZEROS, 1, 2)

TILE_PRODUCTS(products_int4_short, 4, true, false)
TILE_PRODUCTS(products_int4_short_zeros, 4, true, true)
TILE_PRODUCTS(products_int4, 4, false, false)
TILE_PRODUCTS(products_int4_zeros, 4, false, true)
TILE_PRODUCTS(products_int8, 8, false, false)
TILE_PRODUCTS(products_int8_zeros, 8, false, true)
TILE_PRODUCTS_OF(products_int4_16x32, 4, false, false, 1, 4)
TILE_PRODUCTS_OF(products_int4_zeros_16x32, 4, false, true, 1, 4)
TILE_PRODUCTS_OF(products_int8_16x32, 8, false, false, 1, 4)
TILE_PRODUCTS_OF(products_int8_zeros_16x32, 8, false, true, 1, 4)
TILE_PRODUCTS_OF(products_int4_32x32, 4, false, false, 2, 4)
TILE_PRODUCTS_OF(products_int4_zeros_32x32, 4, false, true, 2, 4)
TILE_PRODUCTS_OF(products_int8_32x32, 8, false, false, 2, 4)
