// The nodes of a rank's graph, in FP32. A warp of 32 threads works on a row, a head or a few outputs, and adds up by
// shuffles; the order of a sum depends on nothing but its length. Values are f32[rows, width] with a stride between rows.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr float LOWEST = -3.402823466e+38f;

__device__ inline float warp_sum(float value) {
    for (int distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

__device__ inline float warp_max(float value) {
    for (int distance = WARP / 2; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
    return value;
}

// What another lane of the warp has.
__device__ inline float of_lane(float value, int lane) { return __shfl_sync(0xFFFFFFFF, value, lane); }
__device__ inline i64 of_lane(i64 value, int lane) {
    const u32 low = __float_as_uint(of_lane(__uint_as_float(u32(value)), lane));
    const u32 high = __float_as_uint(of_lane(__uint_as_float(u32(value >> 32)), lane));
    return i64(u64(high) << 32 | low);
}

__device__ inline i64 warp_number() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; }

// By what numbers become codes of 8 bits and back, by the bits of the largest magnitude of them: bits of numbers without a
// sign are ordered as integers, those that are none last.
struct Int8Scale {
    bool finite;
    float inverse, scale;
    __device__ explicit Int8Scale(u32 largest) {
        const float most = __uint_as_float(largest);
        const bool tiny = most < 0x1p-100f;
        finite = largest < 0x7F800000;
        inverse = finite && !tiny ? __fdiv_rn(127.f, most) : 0;
        scale = !finite ? __uint_as_float(0x7FC00000) : tiny ? 0 : __fdiv_rn(most, 127.f);
    }
};

// -- matmul: y[tokens, rows] = x[tokens, columns] weights[rows, columns]^T + bias ----------------------------------------
//
// Memory-bound for few tokens: neighbouring lanes read neighbouring runs of a weight's row, several runs ahead, and use
// each for all tokens of the group. What a lane adds up, and in which order, depends neither on ROWS nor on TOKENS nor on
// AHEAD: a token has the same bits in any company. (Products by codes are in quantised.cu; here they are only widened.)

// Codes lie in blocks along the columns: (code - zero) * scale, with the default zero where `zeros` is null.
struct Matrix {
    const u8* weights;
    const float* scales;
    const u8* zeros;
    int columns, shift;  // a block has 2^shift columns
    __device__ i64 block_of(i64 row, int column) const { return row * (columns >> shift) + (column >> shift); }
};

// A code as a float, less its zero: 2^23 + code is a float whose last bits are the code, and the difference is exact.
__device__ inline float centred(u32 code, float zero) {
    return __uint_as_float(0x4B000000u | code) - (8388608.f + zero);
}

// A run is as many neighbouring weights as are read at once.
struct Fp32Run {
    static constexpr bool FLOATS = true;
    static constexpr int RUN = 4;
    typedef uint4 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return read_once(m.weights + 4 * (row * m.columns + first));
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words words, float* values) {
        values[0] = __uint_as_float(words.x), values[1] = __uint_as_float(words.y);
        values[2] = __uint_as_float(words.z), values[3] = __uint_as_float(words.w);
        return 1;  // the scale
    }
};

struct OddFp32Run {  // where rows are no whole runs
    static constexpr bool FLOATS = true;
    static constexpr int RUN = 1;
    typedef u32 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return reinterpret_cast<const u32*>(m.weights)[row * m.columns + first];
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words word, float* values) {
        values[0] = __uint_as_float(word);
        return 1;
    }
};

struct Fp16Run {
    static constexpr bool FLOATS = true;
    static constexpr int RUN = 8;
    typedef uint4 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return read_once(m.weights + 2 * (row * m.columns + first));
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words words, float* values) {
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        for (int i = 0; i < RUN; ++i) values[i] = half_to_float(u16(pairs[i / 2] >> 16 * (i % 2)));
        return 1;
    }
};

struct OddFp16Run {
    static constexpr bool FLOATS = true;
    static constexpr int RUN = 1;
    typedef u16 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return reinterpret_cast<const u16*>(m.weights)[row * m.columns + first];
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words word, float* values) {
        values[0] = half_to_float(word);
        return 1;
    }
};

struct Int8Run {
    static constexpr bool FLOATS = false;
    static constexpr int RUN = 4;
    typedef u32 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return reinterpret_cast<const u32*>(m.weights)[(row * m.columns + first) / 4];
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words word, float* values) {
        const i64 at = m.block_of(row, first);
        const float zero = m.zeros ? m.zeros[at] : 128;
        for (int i = 0; i < RUN; ++i) values[i] = centred(word >> 8 * i & 0xFF, zero);
        return m.scales[at];
    }
};

struct Int4Run {  // the first of two codes is in the lower half of a byte
    static constexpr bool FLOATS = false;
    static constexpr int RUN = 8;
    typedef u32 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return reinterpret_cast<const u32*>(m.weights)[(row * m.columns + first) / 8];
    }
    __device__ static float decode(const Matrix& m, i64 row, int first, Words word, float* values) {
        const i64 at = m.block_of(row, first);
        const float zero = m.zeros ? m.zeros[at / 2] >> 4 * (at % 2) & 0xF : 8;
        for (int i = 0; i < RUN; ++i) values[i] = centred(word >> 4 * i & 0xF, zero);
        return m.scales[at];
    }
};

// So many neighbouring floats, read as widely as they are aligned.
template <int RUN>
__device__ inline void read_run(const float* from, float* values) {
    if constexpr (RUN % 4 == 0) {
        for (int i = 0; i < RUN; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
    } else {
        for (int i = 0; i < RUN; ++i) values[i] = from[i];
    }
}

// Of `sharing` tokens each, x has one row.
template <class Weights, int ROWS, int TOKENS, int AHEAD>
__device__ void matmul(const float* x, int x_stride, int sharing, const Matrix& m, const float* bias, float* y, int y_stride,
                       int tokens, int rows) {
    typedef typename Weights::Words Words;
    static_assert(Weights::FLOATS, "codes have scales");
    constexpr int RUN = Weights::RUN, STEP = WARP * RUN;
    const i64 groups = (tokens + TOKENS - 1) / TOKENS;  // those of one row are neighbours: they read the same weights
    const i64 first_token = warp_number() % groups * TOKENS;
    const i64 first_row = warp_number() / groups * ROWS;
    if (first_row >= rows) return;
    const int lane = threadIdx.x % WARP;
    float totals[ROWS][TOKENS] = {};
    for (int tile = lane * RUN; tile < m.columns; tile += AHEAD * STEP) {
        Words words[AHEAD][ROWS];
#pragma unroll  // or the words would not be in registers
        for (int a = 0; a < AHEAD; ++a)
            for (int r = 0; r < ROWS; ++r) {
                const i64 row = first_row + r < rows ? first_row + r : rows - 1;
                words[a][r] = tile + a * STEP < m.columns ? Weights::read(m, row, tile + a * STEP) : Words{};
            }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int first = tile + a * STEP;
            if (first >= m.columns) break;
            float values[ROWS][RUN];
            for (int r = 0; r < ROWS; ++r) Weights::decode(m, first_row + r, first, words[a][r], values[r]);
            for (int t = 0; t < TOKENS; ++t) {
                float factors[RUN], sums[ROWS] = {};
                const i64 token = first_token + t < tokens ? first_token + t : tokens - 1;
                read_run<RUN>(x + token / sharing * x_stride + first, factors);
                for (int i = 0; i < RUN; ++i)
                    for (int r = 0; r < ROWS; ++r) sums[r] = fmaf(values[r][i], factors[i], sums[r]);
                for (int r = 0; r < ROWS; ++r) totals[r][t] += sums[r];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) {
            const float total = warp_sum(totals[r][t]);
            const i64 row = first_row + r, token = first_token + t;
            if (lane == 0 && row < rows && token < tokens)
                y[token * y_stride + row] = bias ? total + bias[row] : total;
        }
}

#define MATMUL_OF(name, Weights, ROWS, TOKENS, AHEAD)                                                                  \
    extern "C" __global__ void name(const float* x, int x_stride, const u8* weights, const float* bias, float* y,      \
                                    int y_stride, int tokens, int rows, int columns) {                                 \
        const Matrix matrix = {weights, nullptr, nullptr, columns, 0};                                                 \
        matmul<Weights, ROWS, TOKENS, AHEAD>(x, x_stride, 1, matrix, bias, y, y_stride, tokens, rows);                 \
    }

// By weights, and by the tokens that a warp computes together. The more tokens, the more rows share what is read of them.
#define MATMUL(name, Weights)                                                                                          \
    MATMUL_OF(name##_1, Weights, 1, 1, 4)                                                                              \
    MATMUL_OF(name##_2, Weights, 2, 2, 4)                                                                              \
    MATMUL_OF(name##_4, Weights, 2, 4, 2)                                                                              \
    MATMUL_OF(name##_8, Weights, 4, 8, 1)

MATMUL(matmul_fp32, Fp32Run)
MATMUL(matmul_odd_fp32, OddFp32Run)
MATMUL(matmul_fp16, Fp16Run)
MATMUL(matmul_odd_fp16, OddFp16Run)

// to: f32[rows, columns], the rows of a matrix from `first_row` on; a thread per run.
template <class Weights>
__device__ void widen(const Matrix& m, float* to, int first_row, int rows) {
    constexpr int RUN = Weights::RUN;
    const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x, runs = m.columns / RUN;
    const i64 row = first_row + thread / runs;
    if (row >= first_row + rows) return;
    const int first = int(thread % runs) * RUN;
    float values[RUN];
    const float scale = Weights::decode(m, row, first, Weights::read(m, row, first), values);
    float* out = to + thread * RUN;
    if constexpr (RUN % 4 == 0) {
        for (int i = 0; i < RUN; i += 4) {
            *reinterpret_cast<float4*>(out + i) = {values[i] * scale, values[i + 1] * scale, values[i + 2] * scale,
                                                   values[i + 3] * scale};
        }
    } else {
        for (int i = 0; i < RUN; ++i) out[i] = values[i] * scale;
    }
}

#define WIDEN(name, Weights)                                                                                           \
    extern "C" __global__ void name(const u8* weights, const float* scales, const u8* zeros, float* to, int first_row, \
                                    int rows, int columns, int shift) {                                                \
        widen<Weights>({weights, scales, zeros, columns, shift}, to, first_row, rows);                                 \
    }

WIDEN(widen_fp16, Fp16Run)
WIDEN(widen_odd_fp16, OddFp16Run)
WIDEN(widen_int8, Int8Run)
WIDEN(widen_int4, Int4Run)

// -- the small nodes ---------------------------------------------------------------------------------------------------

constexpr int NORM_PART = 512;  // elements of a group that a warp writes

// y = x / sqrt(mean(x^2) + epsilon) * scale for each of `groups` groups of `width` in each row. A warp writes a part of a
// group: all of its warps add up the squares of all of it, as that takes less time than to tell each other.
extern "C" __global__ void rms_norm(const float* x, int x_stride, const float* scale, float* y, int y_stride, int rows,
                                    int groups, int width, float epsilon) {
    const int parts = (width + NORM_PART - 1) / NORM_PART, lane = threadIdx.x % WARP;
    const i64 row = warp_number() / parts / groups;
    const int group = int(warp_number() / parts % groups), first = int(warp_number() % parts) * NORM_PART + lane;
    if (row >= rows) return;
    const float* from = x + row * x_stride + group * width;
    float own[NORM_PART / WARP], scales[NORM_PART / WARP];  // read at once with what is added up, for the memory is far
#pragma unroll
    for (int i = 0; i < NORM_PART / WARP; ++i) {
        const int at = first + i * WARP;
        own[i] = at < width ? from[at] : 0, scales[i] = at < width ? scale[at] : 0;
    }
    float squares = 0;
    if (width % 4 == 0 && x_stride % 4 == 0) {
#pragma unroll 16
        for (int i = 4 * lane; i < width; i += 4 * WARP) {
            float values[4];
            read_run<4>(from + i, values);
            for (int j = 0; j < 4; ++j) squares = fmaf(values[j], values[j], squares);
        }
    } else {
        for (int i = lane; i < width; i += WARP) squares = fmaf(from[i], from[i], squares);
    }
    const float root = sqrtf(warp_sum(squares) / width + epsilon);
    float* to = y + row * y_stride + group * width;
#pragma unroll
    for (int i = 0; i < NORM_PART / WARP; ++i)
        if (first + i * WARP < width) to[first + i * WARP] = own[i] / root * scales[i];
}

__device__ inline i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

extern "C" __global__ void add(const float* a, int a_stride, const float* b, int b_stride, float* y, int y_stride,
                               int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = a[row * a_stride + i] + b[row * b_stride + i];
}

__device__ inline float sigmoid_of(float x) {
    const float decay = expf(-fabsf(x));  // of a non-positive number: no overflow
    return (x >= 0 ? 1 : decay) / (1 + decay);
}

extern "C" __global__ void swish_mul(const float* gate, int gate_stride, const float* up, int up_stride, float* y,
                                     int y_stride, int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float g = gate[row * gate_stride + i];
    y[row * y_stride + i] = g * sigmoid_of(g) * up[row * up_stride + i];
}

// y = x * factor + addend
extern "C" __global__ void scale(const float* x, int x_stride, float factor, float addend, float* y, int y_stride, int rows,
                                 int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] * factor + addend;
}

// -- routers: which experts a row chooses, and how much of each it gets -------------------------------------------------

extern "C" __global__ void sigmoid(const float* x, int x_stride, float* y, int y_stride, int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = sigmoid_of(x[row * x_stride + i]);
}

// A warp per row.
extern "C" __global__ void softmax(const float* x, int x_stride, float* y, int y_stride, int rows, int width) {
    const i64 row = warp_number();
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float* from = x + row * x_stride;
    float largest = LOWEST, total = 0;
    for (int i = lane; i < width; i += WARP) largest = fmaxf(largest, from[i]);
    largest = warp_max(largest);
    for (int i = lane; i < width; i += WARP) total += expf(from[i] - largest);
    total = warp_sum(total);
    for (int i = lane; i < width; i += WARP) y[row * y_stride + i] = expf(from[i] - largest) / total;
}

// The `count` largest of each row, the first of those that are equal, in their order: their values and where they are, both
// [rows, count]. A warp per row.
extern "C" __global__ void top_k(const float* x, int x_stride, float* values, int* where, int rows, int width, int count) {
    const i64 row = warp_number();
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float* from = x + row * x_stride;
    float before = 0;  // the one that was taken before, and where it is
    int at_before = -1;
    for (int n = 0; n < count; ++n) {
        float best = 0;
        int at = -1;
        for (int i = lane; i < width; i += WARP) {
            const float own = from[i];
            const bool taken = n && (own > before || (own == before && i <= at_before));
            if (!taken && (at < 0 || own > best)) best = own, at = i;
        }
        for (int distance = WARP / 2; distance; distance /= 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, best, distance);
            const int its = int(__float_as_uint(__shfl_xor_sync(0xFFFFFFFF, __uint_as_float(u32(at)), distance)));
            if (its >= 0 && (at < 0 || other > best || (other == best && its < at))) best = other, at = its;
        }
        if (at < 0) at = 0, best = from[0];  // what is no number has no order: any row of a table will do
        before = best, at_before = at;
        if (lane == 0) values[row * count + n] = best, where[row * count + n] = at;
    }
}

// y[rows, count]: the elements of x's rows at some places
extern "C" __global__ void gather(const float* x, int x_stride, const int* where, float* y, int rows, int count) {
    const i64 at = thread_number();
    if (at < i64(rows) * count) y[at] = x[at / count * x_stride + where[at]];
}

extern "C" __global__ void sum_row(const float* x, int x_stride, float* y, int rows, int width) {
    if (thread_number() >= rows) return;
    float total = 0;
    for (int i = 0; i < width; ++i) total += x[thread_number() * x_stride + i];
    y[thread_number()] = total;
}

// y = x / by, which has an element for each row
extern "C" __global__ void divide(const float* x, int x_stride, const float* by, float* y, int y_stride, int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] / by[row];
}

// y = base + the sum of the results of a row's experts, f32[rows, count, width], by their weights, in the order of the
// experts' numbers: so it has the same bits as on a CPU. No two of a row's are the same. `base` may be null.
extern "C" __global__ void mix(const float* results, const float* weights, const int* chosen, const float* base,
                               int base_stride, float* y, int y_stride, int rows, int count, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    float total = base ? base[row * base_stride + i] : 0;
    for (int n = 0, last = -1; n < count; ++n) {
        int next = 0x7FFFFFFF, at = 0;
        for (int k = 0; k < count; ++k) {
            const int expert = chosen[row * count + k];
            if (expert > last && expert < next) next = expert, at = k;
        }
        if (next == 0x7FFFFFFF) break;
        total += weights[row * count + at] * results[(row * count + at) * width + i];
        last = next;
    }
    y[row * y_stride + i] = total;
}

// y = swish(min(gate, limit)) * (clamp(up) + addend), where a swish is g * sigmoid(alpha * g)
extern "C" __global__ void clamped_swish_mul(const float* gate, int gate_stride, const float* up, int up_stride, float alpha,
                                             float limit, float addend, float* y, int y_stride, int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float g = fminf(gate[row * gate_stride + i], limit);
    const float u = fmaxf(fminf(up[row * up_stride + i], limit), -limit) + addend;
    y[row * y_stride + i] = g * sigmoid_of(alpha * g) * u;
}

// y = x * by, which has an element for each row, or for each of x
extern "C" __global__ void multiply(const float* x, int x_stride, const float* by, int by_stride, float* y, int y_stride,
                                    int rows, int width, int by_width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] * by[row * by_stride + (by_width == 1 ? 0 : i)];
}

extern "C" __global__ void fill(float* y, float value, i64 count) {
    if (thread_number() < count) y[thread_number()] = value;
}

// -- attention ---------------------------------------------------------------------------------------------------------
// q: f32[rows, heads * width], k and v: f32[rows, kv_heads * width]. Rows are tokens of one sequence or of several. The
// keys of a layer are [blocks, kv_heads, tokens, width], and so are its values: a block has so many positions. Layers
// with a window may have blocks of their own (`own` is 1), where a sequence has blocks for what it may still see. Where
// a row stands is read from memory, so that a step that was captured once as a graph can be run for any sequences.
//
// Keys and values are kept as floats, as FP16, each rounded to nearest, half to even, or as INT8: a head of a position has
// a scale, f32[blocks, kv_heads, tokens], and codes, as a block of activations in quantised.cu. A score is then multiplied
// by its key's scale, and the weight of a value by the value's.

// Of a row: the blocks of its sequence and its rotary tables, its position, and the slot of its adapter or 0.
struct Place {
    u64 blocks[2];  // i32[...]: which block has the first positions, which the next, and so on; of layers with own blocks
    u64 cosines, sines;
    i64 position, adapter;
    // The number of some position's head among all that a layer keeps keys, or values, of.
    __device__ i64 cached(int at, int own, int tokens, int kv_head, int kv_heads) const {
        const i64 block = reinterpret_cast<const int*>(floats_at(blocks[own]))[at / tokens];
        return (block * kv_heads + kv_head) * tokens + at % tokens;
    }
};

struct Fp32Kept {
    typedef float Number;
    static constexpr bool SCALED = false;
    __device__ static float read(float number) { return number; }
    __device__ static void read_four(const float* from, float* to) { read_run<4>(from, to); }
    __device__ static float rounded(float value) { return value; }
};

struct Fp16Kept {
    typedef u16 Number;
    static constexpr bool SCALED = false;
    __device__ static float read(u16 number) { return half_to_float(number); }
    __device__ static void read_four(const u16* from, float* to) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        to[0] = half_to_float(u16(words.x)), to[1] = half_to_float(u16(words.x >> 16));
        to[2] = half_to_float(u16(words.y)), to[3] = half_to_float(u16(words.y >> 16));
    }
    __device__ static u16 rounded(float value) { return float_to_half(value); }
};

struct Int8Kept {
    typedef signed char Number;
    static constexpr bool SCALED = true;
    __device__ static float read(signed char code) { return float(code); }
    __device__ static void read_four(const signed char* from, float* to) {
        const u32 word = *reinterpret_cast<const u32*>(from);
        for (int i = 0; i < 4; ++i) to[i] = float((signed char)(word >> 8 * i));
    }
    __device__ static signed char rounded(float shifted) {
        const float magic = 12582912.f;  // 1.5 * 2^23: the last bits of the sum are the nearest integer's
        return (signed char)(__float_as_uint(__fadd_rn(shifted, magic)) - __float_as_uint(magic));
    }
};

constexpr int MOST_PAIRS = 4;  // of a head that a lane has

// Rotates the first half of each head against its second; q stays where it is, k and v go to the blocks. A warp per row and
// head of q, k and v.
template <class Format>
__device__ void rotate(float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,
                       const Place* places, void* keys, float* key_scales, void* values, float* value_scales, int own,
                       int tokens, int rows, int heads, int kv_heads, int width) {
    const int half = width / 2, all = heads + 2 * kv_heads, lane = threadIdx.x % WARP;
    const i64 row = warp_number() / all;
    const int head = int(warp_number() % all), kv = head < heads ? 0 : (head - heads) % kv_heads;
    if (row >= rows) return;
    const Place place = places[row];
    const int at = int(place.position);
    const bool asks = head < heads, tells = head >= heads + kv_heads;
    const float* from = asks    ? q + row * q_stride + head * width
                        : tells ? v + row * v_stride + kv * width
                                : k + row * k_stride + kv * width;
    float first[MOST_PAIRS], second[MOST_PAIRS];
    u32 largest = 0;  // as bits, see Int8Scale
    for (int p = 0; p < MOST_PAIRS; ++p) {
        const int i = p * WARP + lane;
        if (i >= half) break;
        first[p] = from[i], second[p] = from[i + half];
        if (!tells) {
            const i64 turn = i64(at) * half + i;
            const float cosine = floats_at(place.cosines)[turn], sine = floats_at(place.sines)[turn];
            const float a = first[p], b = second[p];
            first[p] = a * cosine - b * sine;
            second[p] = b * cosine + a * sine;
        }
        const u32 one = __float_as_uint(first[p]) & 0x7FFFFFFF, other = __float_as_uint(second[p]) & 0x7FFFFFFF;
        largest = largest > one ? largest : one;
        largest = largest > other ? largest : other;
    }
    if (Format::SCALED)
        for (int distance = WARP / 2; distance; distance /= 2) {
            const float seen = __shfl_xor_sync(0xFFFFFFFF, __uint_as_float(largest), distance);
            largest = largest > __float_as_uint(seen) ? largest : __float_as_uint(seen);
        }
    if (asks) {
        float* to = q + row * q_stride + head * width;
        for (int p = 0; p < MOST_PAIRS; ++p)
            if (p * WARP + lane < half) to[p * WARP + lane] = first[p], to[p * WARP + lane + half] = second[p];
        return;
    }
    const i64 cached = place.cached(at, own, tokens, kv, kv_heads);
    bool finite = true;
    float inverse = 1;
    if (Format::SCALED) {
        const Int8Scale by(largest);
        finite = by.finite, inverse = by.inverse;
        if (lane == 0) (tells ? value_scales : key_scales)[cached] = by.scale;
    }
    typename Format::Number* to = static_cast<typename Format::Number*>(tells ? values : keys) + cached * width;
    for (int p = 0; p < MOST_PAIRS; ++p) {
        const int i = p * WARP + lane;
        if (i >= half) break;
        to[i] = Format::rounded(Format::SCALED ? __fmul_rn(finite ? first[p] : 0, inverse) : first[p]);
        to[i + half] = Format::rounded(Format::SCALED ? __fmul_rn(finite ? second[p] : 0, inverse) : second[p]);
    }
}

#define ROTATE(name, Format)                                                                                           \
    extern "C" __global__ void name(float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,\
                                    const Place* places, void* keys, float* key_scales, void* values,                  \
                                    float* value_scales, int own, int tokens, int rows, int heads, int kv_heads,       \
                                    int width) {                                                                       \
        rotate<Format>(q, q_stride, k, k_stride, v, v_stride, places, keys, key_scales, values, value_scales, own,     \
                       tokens, rows, heads, kv_heads, width);                                                          \
    }

ROTATE(rotate_fp32, Fp32Kept)
ROTATE(rotate_fp16, Fp16Kept)
ROTATE(rotate_int8, Int8Kept)

constexpr int PART = 32;  // positions that one warp attends to, at least, before a row's are given to several
constexpr int MOST_PARTS = 64;

// The positions that a row sees...
struct Seen {
    int start, stop;
    __device__ Seen(i64 position, int window) {
        stop = int(position) + 1;
        start = window && stop > window ? stop - window : 0;
    }
    // ...and in how many parts.
    __device__ int parts() const {
        const int parts = (stop - start + PART - 1) / PART;
        return parts < MOST_PARTS ? parts : MOST_PARTS;
    }
};

// The product of a query, f32[width], and a key.
template <class Format>
__device__ inline float dot(const float* query, const typename Format::Number* key, int width) {
    float sum = 0;
    if (width % 4 == 0) {
#pragma unroll 16  // as many reads under way
        for (int i = 0; i < width; i += 4) {
            float of_query[4], of_key[4];
            read_run<4>(query + i, of_query);
            Format::read_four(key + i, of_key);
            for (int j = 0; j < 4; ++j) sum = fmaf(of_query[j], of_key[j], sum);
        }
    } else {
        for (int i = 0; i < width; ++i) sum = fmaf(query[i], Format::read(key[i]), sum);
    }
    return sum;
}

// One part of the positions that a row sees, a warp per row, head and part: f32[2 + width] of
// `partials`: f32[rows, heads, room, 2 + width], which are the largest score, the sum of the exponentials and the sum of
// the values by them (flash decoding). No row has more than `room` parts. What a part is and how it is summed depends
// only on what the row sees, never on blocks or other rows. Neighbouring warps have the same part of rows and heads that
// may read the same keys. A lane has the scores of every 32nd position, and every 32nd element of the values: a head is no
// wider than SLICES of these. The query, f32[rows, heads * width] with rows and heads of whole fours, if `width` is some.
template <class Format, int SLICES>
__device__ void attend(const float* q, int q_stride, const Place* places, const void* keys, const float* key_scales,
                       const void* values, const float* value_scales, int own, int tokens, float* partials, int rows,
                       int heads, int kv_heads, int width, float scale, int window, int room) {
    typedef typename Format::Number Number;
    const i64 number = warp_number(), row = number % rows;
    const int head = int(number / rows % heads), part = int(number / rows / heads), lane = threadIdx.x % WARP;
    if (part >= room) return;
    const Place* place = places + row;
    const Seen seen(place->position, window);
    const int parts = seen.parts();
    if (part >= parts) return;
    const int length = (seen.stop - seen.start + parts - 1) / parts, from = seen.start + part * length;
    const int to = from + length < seen.stop ? from + length : seen.stop;
    const float* query = q + row * q_stride + head * width;
    float sums[SLICES] = {}, largest = LOWEST, total = 0;  // of this lane's positions
    for (int first = from; first < to; first += WARP) {
        const int count = to - first < WARP ? to - first : WARP, at = first + (lane < count ? lane : count - 1);
        const i64 cached = place->cached(at, own, tokens, head / (heads / kv_heads), kv_heads);
        const Number* own_value = static_cast<const Number*>(values) + cached * width;
        for (int i = 0; i < width; i += 128 / int(sizeof(Number))) prefetch(own_value + i);  // while keys are read
        float score = dot<Format>(query, static_cast<const Number*>(keys) + cached * width, width) * scale;
        if (Format::SCALED) score *= key_scales[cached];
        const float higher = fmaxf(largest, warp_max(score)), shrink = expf(largest - higher);
        float weight = lane < count ? expf(score - higher) : 0;
        largest = higher;
        total = fmaf(total, shrink, weight);
        for (int s = 0; s < SLICES; ++s) sums[s] *= shrink;
        if (Format::SCALED) weight *= value_scales[cached];
#pragma unroll 16
        for (int other = 0; other < count; ++other) {
            const float of_other = of_lane(weight, other);
            const Number* value = static_cast<const Number*>(values) + of_lane(cached, other) * width;
            for (int s = 0; s < SLICES; ++s) {
                const int i = s * WARP + lane;
                if (i < width) sums[s] = fmaf(of_other, Format::read(value[i]), sums[s]);
            }
        }
    }
    total = warp_sum(total);
    float* out = partials + ((row * heads + head) * room + part) * (2 + width);
    if (lane == 0) out[0] = largest, out[1] = total;
    for (int s = 0; s < SLICES; ++s)
        if (s * WARP + lane < width) out[2 + s * WARP + lane] = sums[s];
}

#define ATTEND(name, Format, SLICES)                                                                                   \
    extern "C" __global__ void name(const float* q, int q_stride, const Place* places, const void* keys,               \
                                    const float* key_scales, const void* values, const float* value_scales, int own,   \
                                    int tokens, float* partials, int rows, int heads, int kv_heads, int width,         \
                                    float scale, int window, int room) {                                               \
        attend<Format, SLICES>(q, q_stride, places, keys, key_scales, values, value_scales, own, tokens, partials,     \
                               rows, heads, kv_heads, width, scale, window, room);                                     \
    }

// By the widest head, and what keys and values are kept as.
#define ATTEND_IN(format, Format)                                                                                      \
    ATTEND(attend_64_##format, Format, 2) ATTEND(attend_128_##format, Format, 4) ATTEND(attend_256_##format, Format, 8)
ATTEND_IN(fp32, Fp32Kept)
ATTEND_IN(fp16, Fp16Kept)
ATTEND_IN(int8, Int8Kept)

// y: f32[rows, heads * width] of all parts; a thread per value. A head may have a sink, f32[heads]: a score without a value.
extern "C" __global__ void combine(const float* partials, const float* sinks, float* y, int y_stride, const Place* places,
                                   int rows, int heads, int width, int window, int room) {
    const int i = int(thread_number() % width);
    const i64 number = thread_number() / width, row = number / heads;
    if (row >= rows) return;
    const int parts = Seen(places[row].position, window).parts();
    const float* from = partials + number * room * (2 + width);
    float largest = sinks ? sinks[number % heads] : LOWEST, total = 0, sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) largest = fmaxf(largest, from[part * (2 + width)]);
    if (sinks) total = expf(sinks[number % heads] - largest);
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
        const float* each = from + part * (2 + width);
        const float weight = expf(each[0] - largest);  // a part without positions has none
        total = fmaf(each[1], weight, total);
        sum = fmaf(each[2 + i], weight, sum);
    }
    y[row * y_stride + number % heads * width + i] = sum / total;
}

// -- adapters: y += up @ (down @ x), each row with the matrices of its own slot -----------------------------------------
// A product has parts side by side, and a table AdaptedFactors[parts, slots] says what is in slots. The sum of a row depends on
// its own adapter alone; a zero changes no bit of y.

struct AdaptedFactors {
    u64 down, up;  // f32[rank, columns] and f32[rank, width]
    i64 rank;
};

struct AdaptedPart {
    i64 begin, width;
};

// between: f32[rows, parts, most]
extern "C" __global__ void adapt_down(const float* x, int x_stride, const Place* places, const AdaptedFactors* table,
                                      float* between, int rows, int parts, int slots, int columns, int most) {
    const i64 at = warp_number(), row = at / (parts * most);
    if (row >= rows) return;
    const int part = at / most % parts, r = at % most;
    const AdaptedFactors& own = table[part * i64(slots) + places[row].adapter];
    const float* down = floats_at(own.down) + r * i64(columns);
    float total = 0;
    const int end = r < own.rank ? columns : 0;
    for (int i = threadIdx.x % WARP; i < end; i += WARP) total += down[i] * x[row * x_stride + i];
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) between[at] = total;
}

extern "C" __global__ void adapt_up(const float* between, const Place* places, const AdaptedFactors* table, const AdaptedPart* of,
                                    float* y, int y_stride, int rows, int parts, int slots, int width, int most) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    int part = 0;
    while (i >= of[part].begin + of[part].width) ++part;
    const AdaptedFactors& own = table[part * i64(slots) + places[row].adapter];
    const float* up = floats_at(own.up) + (i - of[part].begin);
    float total = 0;
    for (int r = 0; r < own.rank; ++r) total += up[r * of[part].width] * between[(row * parts + part) * most + r];
    if (total != 0) y[row * y_stride + i] += total;
}
