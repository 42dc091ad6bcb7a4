// -- matmul: y[tokens, rows] = x[tokens, columns] weights[rows, columns]^T + bias ----------------------------------------
//
// Memory-bound for few tokens: neighbouring lanes read neighbouring runs of a weight's row, several runs ahead, and use
// each for all tokens of the group. What a lane adds up, and in which order, depends neither on ROWS nor on TOKENS nor on
// AHEAD: a token has the same bits in any company. Products by codes are in quantised.cu.

struct Matrix {
    const u8* weights;
    int columns;
};

// A run is as many neighbouring weights as are read at once: 16 bytes of them...
template <int BYTES>
struct WholeRun {
    static constexpr int RUN = 16 / BYTES;
    typedef uint4 Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return read_once(m.weights + BYTES * (row * m.columns + first));
    }
};

// ...or one, where rows are no whole runs.
template <class Number>
struct OddRun {
    static constexpr int RUN = 1;
    typedef Number Words;
    __device__ static Words read(const Matrix& m, i64 row, int first) {
        return reinterpret_cast<const Number*>(m.weights)[row * m.columns + first];
    }
};

struct Fp32Run : WholeRun<4> {
    __device__ static void decode(Words words, float* values) {
        values[0] = __uint_as_float(words.x), values[1] = __uint_as_float(words.y);
        values[2] = __uint_as_float(words.z), values[3] = __uint_as_float(words.w);
    }
};

struct OddFp32Run : OddRun<u32> {
    __device__ static void decode(Words word, float* values) { values[0] = __uint_as_float(word); }
};

struct Fp16Run : WholeRun<2> {
    __device__ static void decode(Words words, float* values) {
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        for (int i = 0; i < RUN; ++i) values[i] = half_to_float(u16(pairs[i / 2] >> 16 * (i % 2)));
    }
};

struct OddFp16Run : OddRun<u16> {
    __device__ static void decode(Words word, float* values) { values[0] = half_to_float(word); }
};

// Of `sharing` tokens each, x has one row.
template <class Weights, int ROWS, int TOKENS, int AHEAD>
__device__ void matmul(const float* x, int x_stride, int sharing, const Matrix& m, const float* bias, float* y, int y_stride,
                       int tokens, int rows) {
    typedef typename Weights::Words Words;
    constexpr int RUN = Weights::RUN, STEP = WARP * RUN;
    const i64 groups = (tokens + TOKENS - 1) / TOKENS;  // those of one row are neighbours: they read the same weights
    const i64 first_token = warp_number() % groups * TOKENS;
    const i64 first_row = warp_number() / groups * ROWS;
    if (first_row >= rows) return;
    const int lane = threadIdx.x % WARP;
    float totals[ROWS][TOKENS] = {};
    Words words[AHEAD][ROWS];
    const auto read_ahead = [&](int tile) {
#pragma unroll  // or the words would not be in registers
        for (int a = 0; a < AHEAD; ++a)
            for (int r = 0; r < ROWS; ++r) {
                if (tile + a * STEP >= m.columns) break;
                words[a][r] = Weights::read(m, first_row + r < rows ? first_row + r : rows - 1, tile + a * STEP);
            }
    };
    read_ahead(lane * RUN);  // weights are there before what they are multiplied by
    wait_for_previous();
    for (int tile = lane * RUN; tile < m.columns; tile += AHEAD * STEP) {
        if (tile > lane * RUN) read_ahead(tile);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int first = tile + a * STEP;
            if (first >= m.columns) break;
            float values[ROWS][RUN];
            for (int r = 0; r < ROWS; ++r) Weights::decode(words[a][r], values[r]);
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
        const Matrix matrix = {weights, columns};                                                                      \
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
    float values[RUN];
    Weights::decode(Weights::read(m, row, int(thread % runs) * RUN), values);
    write_run<RUN>(to + thread * RUN, values);
}

#define WIDEN(name, Weights)                                                                                           \
    extern "C" __global__ void name(const u8* weights, float* to, int first_row, int rows, int columns) {              \
        wait_for_previous();                                                                                           \
        widen<Weights>({weights, columns}, to, first_row, rows);                                                       \
    }

WIDEN(widen_fp16, Fp16Run)
WIDEN(widen_odd_fp16, OddFp16Run)

#define EXPERT_MATMUL(name, Weights)                                                                                   \
    extern "C" __global__ void name(const float* x, int x_stride, int sharing, const ExpertMatrix* experts,            \
                                    const int* chosen, float* y, int y_stride, int tokens, int rows, int columns) {    \
        wait_for_previous();                                                                                           \
        const ExpertMatrix own = experts[chosen[warp_number() % tokens]];                                              \
        const Matrix matrix = {reinterpret_cast<const u8*>(floats_at(own.weights)), columns};                          \
        matmul<Weights, 1, 1, 4>(x, x_stride, sharing, matrix, own.bias ? floats_at(own.bias) : nullptr, y, y_stride,  \
                                 tokens, rows);                                                                        \
    }

EXPERT_MATMUL(expert_matmul_fp32_1, Fp32Run)
EXPERT_MATMUL(expert_matmul_odd_fp32_1, OddFp32Run)
EXPERT_MATMUL(expert_matmul_fp16_1, Fp16Run)
EXPERT_MATMUL(expert_matmul_odd_fp16_1, OddFp16Run)
