// The sum of N terms in rank order, in FP32, and the encoding of a rank's own term: motley/transport/formats.py and
// reduce.py on the device, bit for bit (but for which NaN a NaN is).
//
// A thread handles RUN consecutive elements, 128 bits or more of each term at a time, and reads all that it needs before
// it writes, so that the sum may lie where the own term was. Products and sums are rounded one by one: no fma.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int RUN = 8;     // elements per thread
constexpr int BLOCK = 64;  // elements that share a scale

// A format has load(payload, n, first, count, values): the elements [first, first + count) of n, and the float formats
// have store(payload, first, count, values). `first` is a multiple of RUN, `count` is RUN but at the end.

struct Fp32 {
    __device__ static void load(const u8* payload, i64 n, i64 first, int count, float* values) {
        const float* from = reinterpret_cast<const float*>(payload) + first;
        if (count == RUN) {
            for (int i = 0; i < RUN; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(from + i);
                values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
            }
        } else {
            for (int i = 0; i < count; ++i) values[i] = from[i];
        }
    }
    __device__ static void store(u8* payload, i64 first, int count, const float* values) {
        float* to = reinterpret_cast<float*>(payload) + first;
        if (count == RUN) {
            for (int i = 0; i < RUN; i += 4)
                *reinterpret_cast<float4*>(to + i) = {values[i], values[i + 1], values[i + 2], values[i + 3]};
        } else {
            for (int i = 0; i < count; ++i) to[i] = values[i];
        }
    }
};

template <class Bits>
struct Narrow {  // two bytes per element
    __device__ static void load(const u8* payload, i64 n, i64 first, int count, float* values) {
        const u16* from = reinterpret_cast<const u16*>(payload) + first;
        if (count == RUN) {
            const uint4 eight = *reinterpret_cast<const uint4*>(from);
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
            for (int i = 0; i < RUN; ++i) values[i] = Bits::widen(u16(words[i / 2] >> 16 * (i % 2)));
        } else {
            for (int i = 0; i < count; ++i) values[i] = Bits::widen(from[i]);
        }
    }
    __device__ static void store(u8* payload, i64 first, int count, const float* values) {
        u16* to = reinterpret_cast<u16*>(payload) + first;
        if (count == RUN) {
            u32 words[4];
            for (int i = 0; i < 4; ++i)
                words[i] = Bits::round(values[2 * i]) | u32(Bits::round(values[2 * i + 1])) << 16;
            *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
        } else {
            for (int i = 0; i < count; ++i) to[i] = Bits::round(values[i]);
        }
    }
};

struct HalfBits {
    __device__ static float widen(u16 bits) { return half_to_float(bits); }
    __device__ static u16 round(float value) { return float_to_half(value); }
};

struct BrainBits {
    __device__ static float widen(u16 bits) { return __uint_as_float(u32(bits) << 16); }
    __device__ static u16 round(float value) {
        if (value != value) return 0x7FC0;
        const u32 bits = __float_as_uint(value);
        return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

typedef Narrow<HalfBits> Fp16;
typedef Narrow<BrainBits> Bf16;

__device__ inline i64 blocks_of(i64 n) { return (n + BLOCK - 1) / BLOCK; }

struct Int8 {  // all scales, then all numbers, which are aligned to 4 bytes only
    __device__ static void load(const u8* payload, i64 n, i64 first, int count, float* values) {
        const float scale = reinterpret_cast<const float*>(payload)[first / BLOCK];
        const u8* from = payload + 4 * blocks_of(n) + first;
        u32 words[2] = {};
        if (count == RUN) {
            words[0] = reinterpret_cast<const u32*>(from)[0];
            words[1] = reinterpret_cast<const u32*>(from)[1];
        } else {
            for (int i = 0; i < count; ++i) words[i / 4] |= u32(from[i]) << 8 * (i % 4);
        }
        for (int i = 0; i < count; ++i) {
            const signed char number = (signed char)(words[i / 4] >> 8 * (i % 4) & 0xFF);
            values[i] = __fmul_rn(float(number), scale);
        }
    }
};

__device__ inline i64 first_of_thread() { return RUN * (i64(blockIdx.x) * blockDim.x + threadIdx.x); }

__device__ inline int count_from(i64 first, i64 n) { return n - first < RUN ? int(n - first) : RUN; }

// out = ((x0 + x1) + x2) + ...; x of rank `own` is own_term, those of the others lie `stride` bytes apart.
template <class Wire, class Native>
__device__ void sum(const u8* own_term, const u8* others, i64 stride, int ranks, int own, u8* out, i64 n) {
    const i64 first = first_of_thread();
    if (first >= n) return;
    const int count = count_from(first, n);
    float total[RUN], term[RUN];
    for (int rank = 0; rank < ranks; ++rank) {
        const u8* payload = rank == own ? own_term : others + stride * (rank - (rank > own));
        Wire::load(payload, n, first, count, rank ? term : total);
        if (rank)
            for (int i = 0; i < count; ++i) total[i] = __fadd_rn(total[i], term[i]);
    }
    Native::store(out, first, count, total);
}

template <class Native>
__device__ void encode_bf16(const u8* values, u8* payload, i64 n) {
    const i64 first = first_of_thread();
    if (first >= n) return;
    const int count = count_from(first, n);
    float run[RUN];
    Native::load(values, n, first, count, run);
    Bf16::store(payload, first, count, run);
}

// The eight threads of a block of elements each look for its largest magnitude: its numbers are in the cache anyway, and
// no thread waits for another.
template <class Native>
__device__ void encode_int8(const u8* values, u8* payload, i64 n) {
    const i64 first = first_of_thread();
    if (first >= n) return;
    const i64 start = first / BLOCK * BLOCK;
    float largest = 0, run[RUN];
    for (i64 at = start; at < start + BLOCK && at < n; at += RUN) {
        const int count = count_from(at, n);
        Native::load(values, n, at, count, run);
        for (int i = 0; i < count; ++i) {
            const float magnitude = fabsf(run[i]);
            if (magnitude > largest || magnitude != magnitude) largest = magnitude;  // a NaN stays
        }
    }
    float scale = __fmul_rn(largest, float(1.0 / 127));
    if (scale < 1.17549435e-38f) scale = 0;  // too coarse: the quotients could exceed 127
    const bool broken = !(scale <= 3.402823466e+38f);
    const float divisor = scale == 0 ? 1.0f : scale;
    if (first == start) reinterpret_cast<float*>(payload)[start / BLOCK] = broken ? __uint_as_float(0x7FC00000) : scale;
    const int count = count_from(first, n);
    Native::load(values, n, first, count, run);
    signed char* to = reinterpret_cast<signed char*>(payload + 4 * blocks_of(n) + first);
    for (int i = 0; i < count; ++i) to[i] = broken ? 0 : (signed char)(int(rintf(__fdiv_rn(run[i], divisor))));
}

#define SUM(name, Wire, Native)                                                                                        \
    extern "C" __global__ void name(const u8* own_term, const u8* others, i64 stride, int ranks, int own, u8* out,     \
                                    i64 n) {                                                                           \
        sum<Wire, Native>(own_term, others, stride, ranks, own, out, n);                                               \
    }
#define ENCODE(name, encode, Native)                                                                                   \
    extern "C" __global__ void name(const u8* values, u8* payload, i64 n) { encode<Native>(values, payload, n); }

SUM(sum_fp32_float32, Fp32, Fp32)
SUM(sum_fp16_float16, Fp16, Fp16)
SUM(sum_bf16_bfloat16, Bf16, Bf16)
SUM(sum_bf16_float32, Bf16, Fp32)
SUM(sum_int8_float32, Int8, Fp32)
SUM(sum_int8_float16, Int8, Fp16)
SUM(sum_int8_bfloat16, Int8, Bf16)
ENCODE(encode_bf16_float32, encode_bf16, Fp32)
ENCODE(encode_int8_float32, encode_int8, Fp32)
ENCODE(encode_int8_float16, encode_int8, Fp16)
ENCODE(encode_int8_bfloat16, encode_int8, Bf16)
