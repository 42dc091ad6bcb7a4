// The nodes of a rank's graph, in FP32. A warp of 32 threads works on a row, a head or a few outputs, and adds up by
// shuffles; the order of a sum depends on nothing but its length. Values are f32[rows, width] with a stride between rows.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

constexpr int WARP = 32;
constexpr float LOWEST = -3.402823466e+38f;

__device__ inline float warp_sum(float value) {
    for (int distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

__device__ inline i64 warp_number() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; }

// -- matmul: y[tokens, rows] = x[tokens, columns] weights[rows, columns]^T + bias ----------------------------------------
//
// Memory-bound for few tokens: a lane reads 16 bytes of a weight's row at a time and uses them for all tokens of its
// group; a warp makes ROWS outputs, which share what was read of x. Codes lie in blocks along the columns:
// (code - zero) * scale, with the default zero where `zeros` is null.

template <int LENGTH>
struct Fp32Run {
    static constexpr int RUN = LENGTH;  // weights per lane and read
    __device__ static float load(const u8* weights, const u8* zeros, const float* scales, i64 row, int columns, int block,
                                 int first, float* values) {
        const float* from = reinterpret_cast<const float*>(weights) + row * columns + first;
        if (RUN == 4) {
            const float4 four = *reinterpret_cast<const float4*>(from);
            values[0] = four.x, values[1 % RUN] = four.y, values[2 % RUN] = four.z, values[3 % RUN] = four.w;
        } else {
            for (int i = 0; i < RUN; ++i) values[i] = from[i];
        }
        return 1;  // the scale
    }
};

template <int LENGTH>
struct Int8Run {
    static constexpr int RUN = LENGTH;
    __device__ static float load(const u8* weights, const u8* zeros, const float* scales, i64 row, int columns, int block,
                                 int first, float* values) {
        const i64 at = row * (columns / block) + first / block;
        const float zero = zeros ? zeros[at] : 128;
        const u8* from = weights + row * columns + first;
        if (RUN == 16) {
            const uint4 codes = *reinterpret_cast<const uint4*>(from);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            for (int i = 0; i < RUN; ++i) values[i] = float(words[i / 4 % 4] >> 8 * (i % 4) & 0xFF) - zero;
        } else {
            for (int i = 0; i < RUN; ++i) values[i] = float(from[i]) - zero;
        }
        return scales[at];
    }
};

template <int LENGTH>
struct Int4Run {  // the first of two codes is in the lower half of a byte
    static constexpr int RUN = LENGTH;
    __device__ static float load(const u8* weights, const u8* zeros, const float* scales, i64 row, int columns, int block,
                                 int first, float* values) {
        const i64 at = row * (columns / block) + first / block;
        const float zero = zeros ? zeros[at / 2] >> 4 * (at % 2) & 0xF : 8;
        const u8* from = weights + (row * columns + first) / 2;
        if (RUN == 32) {
            const uint4 codes = *reinterpret_cast<const uint4*>(from);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            for (int i = 0; i < RUN; ++i) values[i] = float(words[i / 8 % 4] >> 4 * (i % 8) & 0xF) - zero;
        } else {
            for (int i = 0; i < RUN; ++i) values[i] = float(from[i / 2] >> 4 * (i % 2) & 0xF) - zero;
        }
        return scales[at];
    }
};

template <class Weights, int ROWS, int TOKENS>
__device__ void matmul(const float* x, int x_stride, const u8* weights, const float* scales, const u8* zeros,
                       const float* bias, float* y, int y_stride, int tokens, int rows, int columns, int block) {
    constexpr int RUN = Weights::RUN;
    const i64 groups = (rows + ROWS - 1) / ROWS;
    const i64 first_row = warp_number() % groups * ROWS;
    const i64 first_token = warp_number() / groups * TOKENS;
    if (first_token >= tokens) return;
    const int lane = threadIdx.x % WARP;
    float totals[ROWS][TOKENS] = {};
    for (int first = lane * RUN; first < columns; first += WARP * RUN) {
        float values[ROWS][RUN], scale[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const i64 row = first_row + r < rows ? first_row + r : rows - 1;
            scale[r] = Weights::load(weights, zeros, scales, row, columns, block, first, values[r]);
        }
        for (int t = 0; t < TOKENS; ++t) {
            const float* from = x + (first_token + t < tokens ? first_token + t : tokens - 1) * x_stride + first;
            float sums[ROWS] = {};
            for (int i = 0; i < RUN; ++i) {
                const float factor = from[i];
                for (int r = 0; r < ROWS; ++r) sums[r] = fmaf(values[r][i], factor, sums[r]);
            }
            for (int r = 0; r < ROWS; ++r) totals[r][t] = fmaf(scale[r], sums[r], totals[r][t]);
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

#define MATMUL(name, Weights, ROWS, TOKENS)                                                                            \
    extern "C" __global__ void name(const float* x, int x_stride, const u8* weights, const float* scales,              \
                                    const u8* zeros, const float* bias, float* y, int y_stride, int tokens, int rows,  \
                                    int columns, int block) {                                                          \
        matmul<Weights, ROWS, TOKENS>(x, x_stride, weights, scales, zeros, bias, y, y_stride, tokens, rows, columns,   \
                                      block);                                                                          \
    }

// By weights, whether rows and blocks are whole runs of 16 bytes, and for one token or several.
MATMUL(matmul_fp32_wide_one, Fp32Run<4>, 2, 1)
MATMUL(matmul_fp32_wide_many, Fp32Run<4>, 2, 4)
MATMUL(matmul_fp32_any_one, Fp32Run<1>, 2, 1)
MATMUL(matmul_fp32_any_many, Fp32Run<1>, 2, 4)
MATMUL(matmul_int8_wide_one, Int8Run<16>, 2, 1)
MATMUL(matmul_int8_wide_many, Int8Run<16>, 2, 4)
MATMUL(matmul_int8_any_one, Int8Run<1>, 2, 1)
MATMUL(matmul_int8_any_many, Int8Run<1>, 2, 4)
MATMUL(matmul_int4_wide_one, Int4Run<32>, 2, 1)
MATMUL(matmul_int4_wide_many, Int4Run<32>, 2, 4)
MATMUL(matmul_int4_any_one, Int4Run<2>, 2, 1)
MATMUL(matmul_int4_any_many, Int4Run<2>, 2, 4)

// -- the small nodes ---------------------------------------------------------------------------------------------------

// y = x / sqrt(mean(x^2) + epsilon) * scale for each of `groups` groups of `width` in each row; a warp per group.
extern "C" __global__ void rms_norm(const float* x, int x_stride, const float* scale, float* y, int y_stride, int rows,
                                    int groups, int width, float epsilon) {
    const i64 row = warp_number() / groups;
    const int group = int(warp_number() % groups), lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float* from = x + row * x_stride + group * width;
    float squares = 0;
    for (int i = lane; i < width; i += WARP) squares = fmaf(from[i], from[i], squares);
    const float root = sqrtf(warp_sum(squares) / width + epsilon);
    float* to = y + row * y_stride + group * width;
    for (int i = lane; i < width; i += WARP) to[i] = from[i] / root * scale[i];
}

__device__ inline i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

extern "C" __global__ void add(const float* a, int a_stride, const float* b, int b_stride, float* y, int y_stride,
                               int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = a[row * a_stride + i] + b[row * b_stride + i];
}

extern "C" __global__ void swish_mul(const float* gate, int gate_stride, const float* up, int up_stride, float* y,
                                     int y_stride, int rows, int width) {
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float g = gate[row * gate_stride + i], decay = expf(-fabsf(g));  // of a non-positive number: no overflow
    y[row * y_stride + i] = g * ((g >= 0 ? 1 : decay) / (1 + decay)) * up[row * up_stride + i];
}

extern "C" __global__ void fill(float* y, float value, i64 count) {
    if (thread_number() < count) y[thread_number()] = value;
}

// -- attention ---------------------------------------------------------------------------------------------------------
// q: f32[T, heads * width], k and v: f32[T, kv_heads * width], caches: f32[kv_heads, capacity, width]

// Rotates the first half of each head against its second; q stays where it is, k and v go to the caches. A thread per
// pair of every head of q, k and v.
extern "C" __global__ void rotate(float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,
                                  float* key_cache, float* value_cache, const float* cosines, const float* sines,
                                  int tokens, int position, int heads, int kv_heads, int width, int capacity) {
    const int half = width / 2, all = heads + 2 * kv_heads;
    const int i = int(thread_number() % half), head = int(thread_number() / half % all);
    const i64 token = thread_number() / half / all, at = position + token;
    if (token >= tokens) return;
    if (head >= heads + kv_heads) {
        const int kv = head - heads - kv_heads;
        const float* from = v + token * v_stride + kv * width;
        float* to = value_cache + (i64(kv) * capacity + at) * width;
        to[i] = from[i], to[i + half] = from[i + half];
        return;
    }
    const int kv = head - heads;
    const float* from = kv < 0 ? q + token * q_stride + head * width : k + token * k_stride + kv * width;
    float* to = kv < 0 ? q + token * q_stride + head * width : key_cache + (i64(kv) * capacity + at) * width;
    const float cosine = cosines[at * half + i], sine = sines[at * half + i];
    const float first = from[i], second = from[i + half];
    to[i] = first * cosine - second * sine;
    to[i + half] = second * cosine + first * sine;
}

constexpr int SLICES = 8;  // of WARP values: the widest head is 256

// One part of the positions that a row sees, a warp per row, head and part: f32[2 + width] of `partials`, which are the
// largest score, the sum of the exponentials and the sum of the values by them (flash decoding).
extern "C" __global__ void attend(const float* q, int q_stride, const float* key_cache, const float* value_cache,
                                  float* partials, int tokens, int position, int heads, int kv_heads, int width,
                                  int capacity, float scale, int window, int parts) {
    const i64 number = warp_number();
    const int part = int(number % parts), head = int(number / parts % heads), lane = threadIdx.x % WARP;
    const i64 token = number / parts / heads;
    if (token >= tokens) return;
    const i64 stop = position + token + 1, start = window && stop > window ? stop - window : 0;
    const i64 length = (stop - start + parts - 1) / parts;
    const i64 from = start + part * length, to = from + length < stop ? from + length : stop;
    const i64 cache = i64(head / (heads / kv_heads)) * capacity;
    float query[SLICES], sums[SLICES] = {}, largest = LOWEST, total = 0;
    for (int s = 0; s < SLICES; ++s) {
        const int i = s * WARP + lane;
        query[s] = i < width ? q[token * q_stride + head * width + i] * scale : 0;
    }
    for (i64 at = from; at < to; ++at) {
        float score = 0;
        for (int s = 0; s < SLICES; ++s) {
            const int i = s * WARP + lane;
            if (i < width) score = fmaf(query[s], key_cache[(cache + at) * width + i], score);
        }
        score = warp_sum(score);
        const float higher = fmaxf(largest, score);
        const float shrink = expf(largest - higher), weight = expf(score - higher);
        largest = higher;
        total = fmaf(total, shrink, weight);
        for (int s = 0; s < SLICES; ++s) {
            const int i = s * WARP + lane;
            if (i < width) sums[s] = fmaf(sums[s], shrink, weight * value_cache[(cache + at) * width + i]);
        }
    }
    float* out = partials + number * (2 + width);
    if (lane == 0) out[0] = largest, out[1] = total;
    for (int s = 0; s < SLICES; ++s)
        if (s * WARP + lane < width) out[2 + s * WARP + lane] = sums[s];
}

// y: f32[T, heads * width] of all parts; a thread per value.
extern "C" __global__ void combine(const float* partials, float* y, int y_stride, int tokens, int heads, int width,
                                   int parts) {
    const int i = int(thread_number() % width);
    const i64 row = thread_number() / width;  // token * heads + head
    if (row >= i64(tokens) * heads) return;
    const float* from = partials + row * parts * (2 + width);
    float largest = LOWEST, total = 0, sum = 0;
    for (int part = 0; part < parts; ++part) largest = fmaxf(largest, from[part * (2 + width)]);
    for (int part = 0; part < parts; ++part) {
        const float* each = from + part * (2 + width);
        const float weight = expf(each[0] - largest);  // a part without positions has none
        total = fmaf(each[1], weight, total);
        sum = fmaf(each[2 + i], weight, sum);
    }
    y[row / heads * y_stride + row % heads * width + i] = sum / total;
}
