// Products by codes of more than a few tokens, on tensor cores: in tiles of 16 rows by 8 tokens. The arithmetic is that of
// quantised.cu, and so is every bit: a piece is as many columns as one multiplication of tiles has, 32 or 16; its sums are
// exact integers, and those of a result become one of its 16 float sums piece by piece.
//
// A row is cut in strips: stretches, or halves of them. Each warp of a block has the same rows, and of them every fourth
// strip or every eighth, as many as make up 16 pieces, so its sums are those of a few parts of all its results. Codes go to
// shared memory, several strips ahead, each warp's to its own. Activations are read a tile of tokens ahead, as they lie in
// the order of the threads that have them: from the first cache, as all blocks of a multiprocessor read the same. At the
// end the warps add up a part of the results each, in the order of `products`.

constexpr int TILE_ROWS = 16;
constexpr int STAGES = 4;   // strips of codes under way
constexpr int UNIT = 16;    // bytes of a row that a tile has at a time
constexpr int PANEL = 256;  // blocks of rows that all tokens have before others: caches hold their codes

// What a kernel is made for: the bits of weights, the bytes of a strip, whether pieces are short, whether each has a scale of
// its own or all of a strip have one, whether zeros are given, a warp's tiles.
template <int BITS_, int STRIP_, bool SHORT_, bool OWN_SCALES, bool ZEROS_, int ROW_TILES_, int TOKEN_TILES_>
struct TileShape {
    static constexpr int BITS = BITS_, STRIP = STRIP_, ROW_TILES = ROW_TILES_, TOKEN_TILES = TOKEN_TILES_;
    static constexpr bool ZEROS = ZEROS_, SHORT = SHORT_;
    static constexpr int SUBS = 8 / BITS;                     // words of activations for a word of codes
    static constexpr int PIECES = STRIP / (SHORT ? 8 : 16);   // of a strip
    static constexpr int UNITS = STRIP / UNIT, SCALES = OWN_SCALES ? PIECES : 1;  // of a strip
    static constexpr int WARPS = PARTS / PIECES;              // of a block: each has a strip of so many
    static constexpr int ROWS = ROW_TILES * TILE_ROWS;        // of a block, as are...
    static constexpr int TOKENS = TOKEN_TILES * TILE_TOKENS;
    static constexpr bool FIRSTS = BITS == 8 && ZEROS;  // a code less its zero is no byte, but a code less 128 is
    // Blocks of a strip that a thread multiplies, and of them those that it reads, for itself and three others.
    static constexpr int ROW_BLOCKS = ROW_TILES * 2 * SCALES, BLOCKS = ROW_BLOCKS < 4 ? 1 : ROW_BLOCKS / 4;
    __device__ static int block(int i) { return (i * 4 + int(threadIdx.x % 4)) % ROW_BLOCKS; }
    // Codes of 4 bits less 8 are multiplied by 16: so they need not be moved within their bytes.
    static constexpr bool SIXTEENFOLD = BITS == 4 && !ZEROS;
};

// A strip of a warp's codes.
template <int STRIP, int ROWS>
struct alignas(16) Stage {
    static constexpr int ROW_WORDS = STRIP / 4, TOGETHER = WARP / ROW_WORDS;  // rows that have all banks
    u32 words[ROWS * ROW_WORDS];

    // Where a row's unit begins: neither whole rows nor one unit of 8 rows are in the same banks.
    __device__ static u32 at(u32 row, u32 unit) {
        return row * ROW_WORDS + (unit ^ row / TOGETHER % (STRIP / UNIT)) * (UNIT / 4);
    }
};

// Sums of two tiles' results, by all warps.
template <int PIECES>
using TileSums = float[2][PARTS / PIECES][4][WARP][PIECES];

template <int STRIP, int ROWS, int PIECES>
union TileMemory {
    Stage<STRIP, ROWS> stages[PARTS / PIECES][STAGES];
    TileSums<PIECES> sums;
};

// What a thread has of a tile of tokens in a strip. There is memory for whole tiles, whatever lies there.
template <class Shape>
struct Activations {
    static constexpr int WORDS = Shape::UNITS * Shape::SUBS, TOGETHER = WORDS < 4 ? WORDS : 4;
    u32 words[WORDS];
    float scales[Shape::SCALES][2];
    int firsts[Shape::PIECES][2];

    // The thread's scales of a tile begin at `heads`, its words so many bytes after.
    __device__ void read(const u8* heads, u32 to_words) {
#pragma unroll
        for (int i = 0; i < WORDS; i += TOGETHER) {
            Piece<TOGETHER> some;
            read_piece(heads + to_words + i * WARP * 4, some);
#pragma unroll
            for (int word = 0; word < TOGETHER; ++word) words[i + word] = some.words[word];
        }
#pragma unroll
        for (int piece = 0; piece < Shape::SCALES; ++piece) {
            const uint2 two = reinterpret_cast<const uint2*>(heads)[piece * TILE_TOKENS / 2];  // tokens
            scales[piece][0] = __uint_as_float(two.x), scales[piece][1] = __uint_as_float(two.y);
        }
#pragma unroll
        for (int piece = 0; Shape::FIRSTS && piece < Shape::PIECES; ++piece) {
            const uint2 two = reinterpret_cast<const uint2*>(heads)[(SHORT_PIECES + piece) * TILE_TOKENS / 2];
            firsts[piece][0] = int(two.x), firsts[piece][1] = int(two.y);
        }
    }
};

// A warp's rows: its last ones are the same one where there are no more.
template <class Shape>
struct TileRows {
    static constexpr int COPIES = Shape::PIECES, COPY = Shape::STRIP / COPIES;  // that a row's strip takes, and their bytes
    static constexpr int OWN = Shape::ROWS * COPIES / WARP;                // copies of a thread
    const u8 *codes, *zeros;
    const float* scales;
    int row_bytes, block_shift;
    int begins[OWN];            // where the thread copies a strip's codes from, of the first strip
    int blocks[Shape::BLOCKS];  // the first ones of rows that it reads scales of

    // Of those from the `first`th of `count` on.
    __device__ TileRows(const Codes& m, int first, int count) : row_bytes(m.row_bytes), block_shift(m.block_shift) {
        const i64 skipped = i64(first) * m.blocks, odd = skipped % Shape::SUBS;
        const int lane = threadIdx.x % WARP, last = count - 1 - first;
        codes = computed_once(m.codes + i64(first) * m.row_bytes);
        scales = computed_once(m.scales + (skipped - odd)), zeros = m.zeros + skipped / Shape::SUBS;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int row = i * (WARP / COPIES) + lane / COPIES;
            begins[i] = (row < last ? row : last) * row_bytes + lane % COPIES * COPY;
        }
#pragma unroll
        for (int i = 0; i < Shape::BLOCKS; ++i) {
            const int row = Shape::block(i) / Shape::SCALES * 8 + lane / 4;
            blocks[i] = int(odd) + (row < last ? row : last) * m.blocks;
        }
    }

    // Begins to copy a strip of codes: zeros behind the end of a row.
    __device__ void fetch(Stage<Shape::STRIP, Shape::ROWS>& stage, int strip) const {
        const int lane = threadIdx.x % WARP, byte = lane % COPIES * COPY;
        const bool there = strip * Shape::STRIP + byte < row_bytes;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 to = stage.at(i * (WARP / COPIES) + lane / COPIES, byte / UNIT) + byte % UNIT / 4;
            copy_async<COPY>(&stage.words[to], codes + (strip * Shape::STRIP + begins[i]), there);
        }
    }
};

// The scales and zeros of the blocks that a thread reads of a strip.
template <class Shape>
struct Blocks {
    float scales[Shape::BLOCKS];
    u32 zeros[Shape::BLOCKS];

    __device__ void read(const TileRows<Shape>& rows, int strip) {
#pragma unroll
        for (int i = 0; i < Shape::BLOCKS; ++i) {
            const int at = (strip * Shape::SCALES + Shape::block(i) % Shape::SCALES) * (Shape::STRIP / Shape::SCALES);
            const bool there = at < rows.row_bytes;
            const int block = rows.blocks[i] + ((there ? at : 0) >> rows.block_shift);
            scales[i] = there ? rows.scales[block] : 0;
            if (!Shape::ZEROS) continue;
            zeros[i] = Shape::BITS == 4 ? rows.zeros[block / 2] >> 4 * (block % 2) & 0xF : rows.zeros[block];
        }
    }

    // Any of the blocks that the thread multiplies.
    __device__ float scale(int block) const {
        return __shfl_sync(0xFFFFFFFF, scales[block / 4], threadIdx.x % WARP / 4 * 4 + block % 4);
    }

    // Of each unit of the thread's row number `row`, a byte: of two short pieces, that of the one which it has codes of.
    __device__ u32 zeros_of(int row) const {
        const u32 bytes = gathered(row * Shape::SCALES / 4);
        if (Shape::SHORT) return __byte_perm(bytes, 0, threadIdx.x % 4 / 2 ? 0x31 : 0x20);
        if (Shape::SCALES == 1) return __byte_perm(bytes, 0, 0x1111 * (row % 4));
        return Shape::SCALES == 2 && row % 2 ? bytes >> 16 : bytes;
    }

    // The zeros that four threads have, each a byte.
    __device__ u32 gathered(int i) const {
        u32 bytes = zeros[i] << threadIdx.x % 4 * 8;
        for (int distance = 1; distance < 4; distance *= 2)
            bytes |= __float_as_uint(__shfl_xor_sync(0xFFFFFFFF, __uint_as_float(bytes), distance));
        return bytes;
    }
};

// Four codes of a row, less their zero (which is in each byte of `zeros`), as signed bytes: the lower halves of a word's
// bytes, or the upper ones, or all. Codes of 8 bits are less 128.
template <class Shape>
__device__ inline u32 signed_codes(u32 word, bool upper, u32 zeros) {
    if (Shape::BITS == 8) return word ^ 0x80808080;
    if (Shape::SIXTEENFOLD) return ((upper ? word : word << 4) ^ 0x80808080) & 0xF0F0F0F0;
    return (((upper ? word >> 4 : word) & 0x0F0F0F0F | 0x80808080) - zeros) ^ 0x80808080;
}

// What a thread multiplies all tokens by in a strip.
template <class Shape>
struct Factors {
    u32 codes[Shape::ROW_TILES][Shape::UNITS][2 * Shape::SUBS];
    float scales[Shape::ROW_TILES][2][Shape::SCALES];
    u32 zeros[Shape::ROW_TILES][2];

    __device__ Factors(const Stage<Shape::STRIP, Shape::ROWS>& stage, const Blocks<Shape>& blocks) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < Shape::ROW_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                zeros[i][half] = Shape::ZEROS ? blocks.zeros_of(i * 2 + half) : 0;
#pragma unroll
                for (int j = 0; j < Shape::SCALES; ++j)
                    scales[i][half][j] = blocks.scale((i * 2 + half) * Shape::SCALES + j);
            }
#pragma unroll
            for (int pair = 0; pair < Shape::UNITS; pair += 2) {
                u32 words[4];  // of rows g and g + 8 in a unit, then in the next one
                const u32 begin = stage.at(lane % 16, lane / 16) ^ pair * (UNIT / 4);
                read_tiles(words, &stage.words[begin + i * TILE_ROWS * stage.ROW_WORDS]);
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    const int unit = pair + word / 2, half = word % 2;
                    const u32 own = Shape::ZEROS ? __byte_perm(zeros[i][half], 0, 0x1111 * unit) : 0;
#pragma unroll
                    for (int sub = 0; sub < Shape::SUBS; ++sub)
                        codes[i][unit][2 * sub + half] = signed_codes<Shape>(words[word], sub > 0, own);
                }
            }
        }
    }
};

// Adds a strip to the sums of a warp's results of a tile of tokens. What is behind the end of a row adds 0 by scales of 0.
template <class Shape>
__device__ void multiply_strip(float (&sums)[Shape::ROW_TILES][4][Shape::PIECES], const Factors<Shape>& by,
                                 const Activations<Shape>& x) {
    constexpr int SUBS = Shape::SUBS, PIECES = Shape::PIECES, OF_A_SCALE = PIECES / Shape::SCALES;
    const int member = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES; ++i) {
        float scales[4];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int unit = piece * Shape::UNITS / PIECES;
            u32 a[2 * SUBS], b[SUBS];
#pragma unroll
            for (int word = 0; word < 2 * SUBS; ++word)
                a[word] = !Shape::SHORT || member / 2 == piece % 2 ? by.codes[i][unit][word] : 0;
#pragma unroll
            for (int sub = 0; sub < SUBS; ++sub) b[sub] = x.words[unit * SUBS + sub];
            int begin[4], exact[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                begin[c] = MAGIC;
                if (Shape::FIRSTS) begin[c] += x.firsts[piece][c % 2] * (int(by.zeros[i][c / 2] >> 8 * unit & 0xFF) - 128);
            }
            multiply_tiles<SUBS>(exact, a, b, begin);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (piece % OF_A_SCALE == 0)
                    scales[c] = by.scales[i][c / 2][piece / OF_A_SCALE] * x.scales[piece / OF_A_SCALE][c % 2];
                const float shifted = __uint_as_float(u32(exact[c]));
                const float number =
                    Shape::SIXTEENFOLD ? fmaf(shifted, 1.f / 16, -MAGIC_VALUE / 16) : shifted - MAGIC_VALUE;
                sums[i][c][piece] = fmaf(number, scales[c], sums[i][c][piece]);
            }
        }
    }
}

// The first row of a block, and the first token.
struct TilePlace {
    int row, token;
};

// Blocks of a panel of rows are in this order: all rows of some tokens, then of the next ones.
template <class Shape>
__device__ inline TilePlace place_of(int block, int tokens, int rows) {
    const int row_blocks = (rows + Shape::ROWS - 1) / Shape::ROWS;
    const int groups = (tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    const int panel = block / (PANEL * groups), in_panel = block % (PANEL * groups);
    const int wide = row_blocks - panel * PANEL < PANEL ? row_blocks - panel * PANEL : PANEL;
    return {(panel * PANEL + in_panel % wide) * Shape::ROWS, in_panel / wide * Shape::TOKENS};
}

// The sum of a result's 16, of which each warp has some.
template <int WARPS, int PIECES>
__device__ inline float total(float (&sums)[WARPS][PIECES]) {
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2)
#pragma unroll
        for (int each = 0; each < half; ++each)
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) sums[each][piece] += sums[each + half][piece];
#pragma unroll
    for (int half = PIECES / 2; half; half /= 2)
#pragma unroll
        for (int piece = 0; piece < half; ++piece) sums[0][piece] += sums[0][piece + half];
    return sums[0][0];
}

// Adds up what the warps have of the block's results, four warps a tile's. It finds out anew where they are: registers were
// few until now.
template <class Shape>
__device__ void write_results(TileSums<Shape::PIECES>& shared,
                              float (&sums)[Shape::TOKEN_TILES][Shape::ROW_TILES][4][Shape::PIECES], const float* bias,
                              float* y, int y_stride, int tokens, int rows) {
    constexpr int PIECES = Shape::PIECES, TILES = Shape::TOKEN_TILES * Shape::ROW_TILES, AT_ONCE = Shape::WARPS / 4;
    const u32 thread = computed_once(threadIdx.x), warp = thread / WARP, c = warp % 4, lane = thread % WARP;
    const TilePlace place = place_of<Shape>(computed_once(blockIdx.x), tokens, rows);
#pragma unroll
    for (int first = 0; first < TILES; first += AT_ONCE) {
        if (AT_ONCE == 2 && first) __syncthreads();  // those before are read
#pragma unroll
        for (int tile = first; tile < first + AT_ONCE && tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                write_run<PIECES>(shared[tile % 2][warp][i][lane], sums[tile / Shape::ROW_TILES][tile % Shape::ROW_TILES][i]);
        __syncthreads();
        const int tile = first + warp / 4;
        if (tile >= TILES) continue;
        float parts[Shape::WARPS][PIECES];
#pragma unroll
        for (int each = 0; each < Shape::WARPS; ++each) read_run<PIECES>(shared[tile % 2][each][c][lane], parts[each]);
        const int row = place.row + tile % Shape::ROW_TILES * TILE_ROWS + c / 2 * 8 + lane / 4;
        const int token = place.token + tile / Shape::ROW_TILES * TILE_TOKENS + lane % 4 * 2 + c % 2;
        if (row < rows && token < tokens) y[i64(token) * y_stride + row] = total(parts) + (bias ? bias[row] : 0.f);
    }
}

// y[tokens, rows] of tokens that were quantised for tiles.
template <class Shape>
__device__ void tile_products(const u8* x, int stretches, const Codes& m, const float* bias, float* y, int y_stride,
                              int tokens, int rows) {
    constexpr int WARPS = Shape::WARPS, OF_A_STRETCH = STRETCH / Shape::STRIP, BYTES = stretch_bytes(Shape::BITS);
    auto& memory = shared_memory<TileMemory<Shape::STRIP, Shape::ROWS, Shape::PIECES>>();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, in_stretch = warp % OF_A_STRETCH;
    const auto [first_row, first_token] = place_of<Shape>(blockIdx.x, tokens, rows);
    const int in_group = first_token % GROUP_TOKENS, strips = stretches * OF_A_STRETCH;
    const TileRows<Shape> own(m, first_row, rows);
    x += (i64(first_token - in_group) * stretches + in_group) * BYTES;
    const u32 to_heads = (in_stretch * Shape::PIECES * TILE_TOKENS + lane % 4 * 2) * 4;
    const u32 word = in_stretch * Activations<Shape>::WORDS;  // of a thread's of a stretch
    const u8* heads = computed_once(x + to_heads);
    const u32 to_words =
        computed_once(TILE_TOKENS * HEAD_BYTES + ((word / 4 * WARP + lane) * 4 + word % 4) * 4 - to_heads);

    float sums[Shape::TOKEN_TILES][Shape::ROW_TILES][4][Shape::PIECES] = {};
    Stage<Shape::STRIP, Shape::ROWS>(&stages)[STAGES] = memory.stages[warp];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        own.fetch(stages[i], warp + i * WARPS);  // weights are there before what they are multiplied by
        commit_copies();
    }
    wait_for_previous();
    Activations<Shape> now;
    Blocks<Shape> blocks;
    if (warp < strips) {
        now.read(heads + warp / OF_A_STRETCH * GROUP_TOKENS * BYTES, to_words), blocks.read(own, warp);
    }
    for (int strip = warp; strip < strips; strip += WARPS) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // all lanes' copies are there, and the stage before is read
        const u32 stage = u32(strip) / WARPS % STAGES;
        own.fetch(stages[(stage + STAGES - 1) % STAGES], strip + (STAGES - 1) * WARPS);
        commit_copies();
        const Factors<Shape> factors(stages[stage], blocks);
        const int next = strip + WARPS < strips ? strip + WARPS : strip;
        blocks.read(own, next);
#pragma unroll
        for (int n = 0; n < Shape::TOKEN_TILES; ++n) {
            Activations<Shape> soon;
            const int tile = (n + 1) % Shape::TOKEN_TILES * TILE_TOKENS;
            soon.read(heads + ((tile ? strip : next) / OF_A_STRETCH * GROUP_TOKENS + tile) * BYTES, to_words);
            multiply_strip<Shape>(sums[n], factors, now);
            now = soon;
        }
    }

    wait_for_copies<0>();
    __syncthreads();  // nobody reads codes, or copies zeros, where the sums come to be
    write_results<Shape>(memory.sums, sums, bias, y, y_stride, tokens, rows);
}

// For at least BLOCKS blocks on a multiprocessor.
#define TILE_PRODUCTS_OF(name, BITS, STRIP, SHORT, ZEROS, ROW_TILES, TOKEN_TILES, BLOCKS)                              \
    extern "C" __global__ void __launch_bounds__(PARTS * WARP * (SHORT ? 8 : 16) / STRIP, BLOCKS)                      \
        name(const u8* x, int stretches, const u8* codes, const float* scales, const u8* zeros, const float* bias,     \
             float* y, int y_stride, int tokens, int rows, int row_bytes, int block_shift, int blocks) {               \
        const Codes matrix = {codes, scales, zeros, row_bytes, block_shift, blocks};                                   \
        if (!SHORT && 1 << block_shift >= STRIP) {                                                                     \
            tile_products<TileShape<BITS, STRIP, SHORT, SHORT, ZEROS, ROW_TILES, TOKEN_TILES>>(                        \
                x, stretches, matrix, bias, y, y_stride, tokens, rows);                                                \
        } else {                                                                                                       \
            tile_products<TileShape<BITS, STRIP, SHORT, true, ZEROS, ROW_TILES, TOKEN_TILES>>(                         \
                x, stretches, matrix, bias, y, y_stride, tokens, rows);                                                \
        }                                                                                                              \
    }

// By the bits of weights, whether zeros are given; then by the rows and tokens of a block, as many as there are registers for.

#define TILE_PRODUCTS(name, BITS, ZEROS)                                                                               \
    TILE_PRODUCTS_OF(name##_16x8, BITS, 64, false, ZEROS, 1, 1, 7)                                                     \
    TILE_PRODUCTS_OF(name##_16x16, BITS, 32, false, ZEROS, 1, 2, 3)                                                    \
    TILE_PRODUCTS_OF(name##_16x32, BITS, 32, false, ZEROS, 1, 4, 3)                                                    \
    TILE_PRODUCTS_OF(name##_32x32, BITS, 32, false, ZEROS, 2, 4, 2)
