// What all kernels of a rank's graph use. They compute in FP32: a warp of 32 threads works on a row, a head or a few outputs,
// and adds up by shuffles; the order of a sum depends on nothing but its length. Values are f32[rows, width] with a stride
// between rows.

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

// Of all threads of a block, in an order that depends on nothing but their number. All of them wait between two calls.
__device__ inline float block_sum(float value) {
    struct Sums {
        float of_warps[WARP];
    };
    Sums& sums = shared_memory<Sums>();
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) sums.of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < int(blockDim.x / WARP); ++warp) total += sums.of_warps[warp];
    return total;
}

// What another lane of the warp has.
__device__ inline float of_lane(float value, int lane) { return __shfl_sync(0xFFFFFFFF, value, lane); }
__device__ inline int of_lane(int value, int lane) {
    return int(__float_as_uint(of_lane(__uint_as_float(u32(value)), lane)));
}

__device__ inline i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline i64 warp_number() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; }

// So many neighbouring floats, read and written as widely as they are aligned.
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
template <int RUN>
__device__ inline void write_run(float* to, const float* values) {
    if constexpr (RUN % 4 == 0) {
        for (int i = 0; i < RUN; i += 4)
            *reinterpret_cast<float4*>(to + i) = {values[i], values[i + 1], values[i + 2], values[i + 3]};
    } else {
        for (int i = 0; i < RUN; ++i) to[i] = values[i];
    }
}

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

// The matrix of one of several experts, of which each row has chosen some.
struct ExpertMatrix {
    u64 weights, scales, zeros, bias;  // addresses; 0: there is none
};
