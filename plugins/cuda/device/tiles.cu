// Products by codes of several tokens, on tensor cores: in tiles of 16 rows by 8 tokens. The arithmetic is that of
// quantised.cu, and so is every bit: a piece is as many columns as one multiplication of tiles has, 32 or 16; its sums are
// exact integers, and those of a result become one of its 16 float sums piece by piece.
//
// A warp has every fourth stretch of its rows (every second where pieces are short), and of its results the sums of four
// (eight) parts, so a block's four warps read 256 neighbouring bytes of each row. Codes go to shared memory, several
// stretches ahead, each warp's to its own. Activations are read a tile of tokens ahead, as they lie in the order of the
// threads that have them: from the first cache, as all blocks of a multiprocessor read the same. At the end all warps
// of a result's sums add up a part of the results, in the order of `products`.

constexpr int TILE_ROWS = 16, BLOCK_WARPS = 4;
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int BLOCKS_OF_FEW = 7;  // blocks of few tokens on a multiprocessor, of one with 164 KB of shared memory or more
#else
constexpr int BLOCKS_OF_FEW = 5;
#endif
constexpr int STAGES = 4;                         // stretches of codes under way
constexpr int UNIT = 16, UNITS = STRETCH / UNIT;  // bytes of a row that a tile has at a time, and how many a stretch has
constexpr int PANEL = 256;  // blocks of rows that all tokens have before others: caches hold their codes

// What a kernel is made for: the bits of weights, the scales of a row's stretch, whether zeros are given, a warp's tiles.
// There are 8 scales where pieces are short, 1 where no block is shorter than a stretch, else 4, of which some may be equal.
template <int BITS_, int SCALES_, bool ZEROS_, int ROW_TILES_, int TOKEN_TILES_>
struct TileShape {
    static constexpr int BITS = BITS_, SCALES = SCALES_, ROW_TILES = ROW_TILES_, TOKEN_TILES = TOKEN_TILES_;
    static constexpr bool ZEROS = ZEROS_, SHORT = SCALES == SHORT_PIECES;
    static constexpr int SUBS = 8 / BITS;                     // words of activations for a word of codes
    static constexpr int PIECES = SHORT ? 8 : 4;              // of a stretch
    static constexpr int CLASSES = PARTS / PIECES;            // of stretches: a warp has those of one
    static constexpr int ROWS = ROW_TILES * TILE_ROWS;        // of a warp
    static constexpr int TOKENS = TOKEN_TILES * TILE_TOKENS;  // of a block
    static constexpr int BLOCK_ROWS = ROWS * BLOCK_WARPS / CLASSES;
    static constexpr bool FIRSTS = BITS == 8 && ZEROS;  // a code less its zero is no byte, but a code less 128 is
    // Blocks of a stretch that a thread multiplies, and of them those that it reads, for itself and three others.
    static constexpr int ROW_BLOCKS = ROW_TILES * 2 * SCALES, BLOCKS = ROW_BLOCKS < 4 ? 1 : ROW_BLOCKS / 4;
    __device__ static int block(int i) { return (i * 4 + int(threadIdx.x % 4)) % ROW_BLOCKS; }
    // Codes of 4 bits less 8 are multiplied by 16: so they need not be moved within their bytes.
    static constexpr bool SIXTEENFOLD = BITS == 4 && !ZEROS;
};

// A stretch of a warp's codes.
template <int ROWS>
struct alignas(16) Stage {
    static constexpr int ROW_WORDS = STRETCH / 4;
    u32 words[ROWS * ROW_WORDS];

    // Where a row's unit begins: neither whole rows nor one unit of 8 rows are in the same banks.
    __device__ static u32 at(u32 row, u32 unit) { return row * ROW_WORDS + (unit ^ row / 2 % UNITS) * (UNIT / 4); }
};

template <int ROWS, int PIECES>
union TileMemory {
    Stage<ROWS> stages[BLOCK_WARPS][STAGES];
    float sums[2][BLOCK_WARPS][4][WARP][PIECES];  // of a tile's results, and of the tile before
};

// What a thread has of a tile of tokens in a stretch. There is memory for whole tiles, whatever lies there.
template <class Shape>
struct Activations {
    u32 words[UNITS * Shape::SUBS];
    float scales[Shape::SCALES][2];
    int firsts[Shape::PIECES][2];

    // The thread's scales of a tile begin at `heads`, its words so many bytes after.
    __device__ void read(const u8* heads, u32 to_words) {
#pragma unroll
        for (int i = 0; i < UNITS * Shape::SUBS; i += 4) {
            const uint4 four = reinterpret_cast<const uint4*>(heads + to_words)[i / 4 * WARP];
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
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
    static constexpr int COPIES = Shape::PIECES, COPY = STRETCH / COPIES;  // that a row's stretch takes, and their bytes
    static constexpr int OWN = Shape::ROWS * COPIES / WARP;                // copies of a thread
    const u8 *codes, *zeros;
    const float* scales;
    int row_bytes, block_shift;
    int begins[OWN];            // where the thread copies a stretch's codes from, of the first stretch
    int blocks[Shape::BLOCKS];  // the first ones of rows that it reads scales of

    // Of the rows of a warp from the `before`th of `count` on, which may be none.
    __device__ TileRows(const Codes& m, int before, int count) : row_bytes(m.row_bytes), block_shift(m.block_shift) {
        const i64 first = before < count ? before : count - 1, skipped = first * m.blocks, odd = skipped % Shape::SUBS;
        const int lane = threadIdx.x % WARP, last = count - 1 - int(first);
        codes = computed_once(m.codes + first * m.row_bytes);
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

    // Begins to copy a stretch of codes: zeros behind the end of a row.
    __device__ void fetch(Stage<Shape::ROWS>& stage, int stretch) const {
        const int lane = threadIdx.x % WARP, byte = lane % COPIES * COPY;
        const bool there = stretch * STRETCH + byte < row_bytes;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 to = stage.at(i * (WARP / COPIES) + lane / COPIES, byte / UNIT) + byte % UNIT / 4;
            copy_async<COPY>(&stage.words[to], codes + (stretch * STRETCH + begins[i]), there);
        }
    }
};

// The scales and zeros of the blocks that a thread reads of a stretch.
template <class Shape>
struct Blocks {
    float scales[Shape::BLOCKS];
    u32 zeros[Shape::BLOCKS];

    __device__ void read(const TileRows<Shape>& rows, int stretch) {
#pragma unroll
        for (int i = 0; i < Shape::BLOCKS; ++i) {
            const int at = stretch * STRETCH + Shape::block(i) % Shape::SCALES * (STRETCH / Shape::SCALES);
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
        u32 bytes = gathered(row * Shape::SCALES / 4);
        if (Shape::SCALES == 1) return __byte_perm(bytes, 0, 0x1111 * (row % 4));
        if (Shape::SCALES == 4) return bytes;
        return __byte_perm(bytes, gathered(row * 2 + 1), threadIdx.x % 4 / 2 ? 0x7531 : 0x6420);
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

// What a thread multiplies all tokens by in a stretch.
template <class Shape>
struct Factors {
    u32 codes[Shape::ROW_TILES][UNITS][2 * Shape::SUBS];
    float scales[Shape::ROW_TILES][2][Shape::SCALES];
    u32 zeros[Shape::ROW_TILES][2];

    __device__ Factors(const Stage<Shape::ROWS>& stage, const Blocks<Shape>& blocks) {
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
            for (int pair = 0; pair < UNITS; pair += 2) {
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

// Adds a stretch to the sums of a warp's results of a tile of tokens. What is behind the end of a row adds 0 by scales of 0.
template <class Shape>
__device__ void multiply_stretch(float (&sums)[Shape::ROW_TILES][4][Shape::PIECES], const Factors<Shape>& by,
                                 const Activations<Shape>& x) {
    constexpr int SUBS = Shape::SUBS, PIECES = Shape::PIECES, OF_A_SCALE = PIECES / Shape::SCALES;
    const int member = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES; ++i) {
        float scales[4];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int unit = piece * UNITS / PIECES;
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

// The first row of a warp, and the first token.
struct TilePlace {
    int row, token;
};

// Blocks of a panel of rows are in this order: all rows of some tokens, then of the next ones.
template <class Shape>
__device__ inline TilePlace place_of(int block, int warp, int tokens, int rows) {
    const int row_blocks = (rows + Shape::BLOCK_ROWS - 1) / Shape::BLOCK_ROWS;
    const int groups = (tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    const int panel = block / (PANEL * groups), in_panel = block % (PANEL * groups);
    const int wide = row_blocks - panel * PANEL < PANEL ? row_blocks - panel * PANEL : PANEL;
    return {(panel * PANEL + in_panel % wide) * Shape::BLOCK_ROWS + warp / Shape::CLASSES * Shape::ROWS,
            in_panel / wide * Shape::TOKENS};
}

// The sum of a result's 16, of which each class of stretches has some.
template <int CLASSES, int PIECES>
__device__ inline float total(float (&sums)[CLASSES][PIECES]) {
#pragma unroll
    for (int half = CLASSES / 2; half; half /= 2)
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

// Adds up what the warps have of the block's results. It finds out anew where they are: registers were few until now.
template <class Shape>
__device__ void write_results(float (&shared)[2][BLOCK_WARPS][4][WARP][Shape::PIECES],
                              float (&sums)[Shape::TOKEN_TILES][Shape::ROW_TILES][4][Shape::PIECES], const float* bias,
                              float* y, int y_stride, int tokens, int rows) {
    constexpr int CLASSES = Shape::CLASSES, PIECES = Shape::PIECES;
    const u32 thread = computed_once(threadIdx.x), warp = thread / WARP, of_class = warp % CLASSES, lane = thread % WARP;
    const TilePlace place = place_of<Shape>(computed_once(blockIdx.x), warp, tokens, rows);
#pragma unroll
    for (int n = 0; n < Shape::TOKEN_TILES; ++n)
#pragma unroll
        for (int i = 0; i < Shape::ROW_TILES; ++i) {
            auto& all = shared[(n * Shape::ROW_TILES + i) % 2];
#pragma unroll
            for (int c = 0; c < 4; ++c)
#pragma unroll
                for (int p = 0; p < PIECES; p += 4) {
                    const float* four = &sums[n][i][c][p];
                    *reinterpret_cast<float4*>(&all[warp][c][lane][p]) = {four[0], four[1], four[2], four[3]};
                }
            __syncthreads();
#pragma unroll
            for (int each = 0; each < 4 / CLASSES; ++each) {
                const u32 c = of_class * (4 / CLASSES) + each;
                float parts[CLASSES][PIECES];
#pragma unroll
                for (int other = 0; other < CLASSES; ++other)
                    read_run<PIECES>(all[warp - of_class + other][c][lane], parts[other]);
                const int row = place.row + i * TILE_ROWS + c / 2 * 8 + lane / 4;
                const int token = place.token + n * TILE_TOKENS + lane % 4 * 2 + c % 2;
                if (row < rows && token < tokens)
                    y[i64(token) * y_stride + row] = total(parts) + (bias ? bias[row] : 0.f);
            }
        }
}

// y[tokens, rows] of tokens that were quantised for tiles.
template <class Shape>
__device__ void tile_products(const u8* x, int stretches, const Codes& m, const float* bias, float* y, int y_stride,
                              int tokens, int rows) {
    constexpr int CLASSES = Shape::CLASSES, PIECES = Shape::PIECES, BYTES = stretch_bytes(Shape::BITS);
    auto& memory = shared_memory<TileMemory<Shape::ROWS, PIECES>>();
    const int warp = threadIdx.x / WARP, of_class = warp % CLASSES, lane = threadIdx.x % WARP;
    const auto [first_row, first_token] = place_of<Shape>(blockIdx.x, warp, tokens, rows);
    const int in_group = first_token % GROUP_TOKENS;
    const TileRows<Shape> own(m, first_row, rows);
    x += (i64(first_token - in_group) * stretches + in_group) * BYTES;
    const u8* heads = computed_once(x + lane % 4 * 8);
    const u32 to_words = computed_once(TILE_TOKENS * HEAD_BYTES + lane * 16 - lane % 4 * 8);

    float sums[Shape::TOKEN_TILES][Shape::ROW_TILES][4][PIECES] = {};
    Stage<Shape::ROWS>(&stages)[STAGES] = memory.stages[warp];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        own.fetch(stages[i], of_class + i * CLASSES);  // weights are there before what they are multiplied by
        commit_copies();
    }
    wait_for_previous();
    Activations<Shape> now;
    Blocks<Shape> blocks;
    if (of_class < stretches) {
        now.read(heads + of_class * GROUP_TOKENS * BYTES, to_words), blocks.read(own, of_class);
    }
    for (int stretch = of_class; stretch < stretches; stretch += CLASSES) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // all lanes' copies are there, and the stage before is read
        const u32 stage = u32(stretch) / CLASSES % STAGES;
        own.fetch(stages[(stage + STAGES - 1) % STAGES], stretch + (STAGES - 1) * CLASSES);
        commit_copies();
        const Factors<Shape> factors(stages[stage], blocks);
        const int next = stretch + CLASSES < stretches ? stretch + CLASSES : stretch;
        blocks.read(own, next);
#pragma unroll
        for (int n = 0; n < Shape::TOKEN_TILES; ++n) {
            Activations<Shape> soon;
            const int tile = (n + 1) % Shape::TOKEN_TILES * TILE_TOKENS;
            soon.read(heads + ((tile ? stretch : next) * GROUP_TOKENS + tile) * BYTES, to_words);
            multiply_stretch<Shape>(sums[n], factors, now);
            now = soon;
        }
    }

    wait_for_copies<0>();
    __syncthreads();  // nobody reads codes, or copies zeros, where the sums come to be
    write_results<Shape>(memory.sums, sums, bias, y, y_stride, tokens, rows);
}

// For at least BLOCKS blocks on a multiprocessor.
#define TILE_PRODUCTS_OF(name, BITS, SHORT, ZEROS, ROW_TILES, TOKEN_TILES, BLOCKS)                                     \
    extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * WARP, BLOCKS)                                           \
        name(const u8* x, int stretches, const u8* codes, const float* scales, const u8* zeros, const float* bias,     \
             float* y, int y_stride, int tokens, int rows, int row_bytes, int block_shift, int blocks) {               \
        const Codes matrix = {codes, scales, zeros, row_bytes, block_shift, blocks};                                   \
        if (!SHORT && 1 << block_shift >= STRETCH) {                                                                   \
            tile_products<TileShape<BITS, SHORT ? 8 : 1, ZEROS, ROW_TILES, TOKEN_TILES>>(                              \
                x, stretches, matrix, bias, y, y_stride, tokens, rows);                                                \
        } else {                                                                                                       \
            tile_products<TileShape<BITS, SHORT ? 8 : 4, ZEROS, ROW_TILES, TOKEN_TILES>>(                              \
                x, stretches, matrix, bias, y, y_stride, tokens, rows);                                                \
        }                                                                                                              \
    }

// By the bits of weights, whether zeros are given; then by the rows and tokens of a warp, as many as there are registers for.
// With few tokens, more blocks on a multiprocessor are worth a few registers less, where there is shared memory for them:
// nearly all of a matrix is under way at once.

#define TILE_PRODUCTS(name, BITS, ZEROS)                                                                               \
    TILE_PRODUCTS_OF(name##_16x8, BITS, false, ZEROS, 1, 1, ZEROS ? 5 : BLOCKS_OF_FEW)                                                         \
    TILE_PRODUCTS_OF(name##_16x16, BITS, false, ZEROS, 1, 2, 4)                                                        \
    TILE_PRODUCTS_OF(name##_16x32, BITS, false, ZEROS, 1, 4, 3)

