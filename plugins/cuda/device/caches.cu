// Keys and values in blocks: where rows find them, what they are kept as, and how they are turned and written there.
//
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
    u64 turns;      // f32[...]: the tables of all rotary embeddings
    i64 position, adapter;
    int before, after;  // rows of its sequence in this step that are at the positions before, and behind
    // The number of some position's head among all that a layer keeps keys, or values, of.
    __device__ i64 cached(int at, int own, int tokens, int kv_head, int kv_heads) const {
        const i64 block = reinterpret_cast<const int*>(floats_at(own ? blocks[1] : blocks[0]))[at / tokens];
        return (block * kv_heads + kv_head) * tokens + at % tokens;
    }
};

// What numbers are kept as: how four neighbours are read, or made of their words.
struct Fp32Kept {
    typedef float Number;
    static constexpr bool SCALED = false;
    __device__ static float read(float number) { return number; }
    __device__ static void read_four(const float* from, float* to) { read_run<4>(from, to); }
    __device__ static void widen(const u32* words, float* to) {
        for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(words[i]);
    }
    __device__ static float rounded(float value) { return value; }
};

struct Fp16Kept {
    typedef u16 Number;
    static constexpr bool SCALED = false;
    __device__ static float read(u16 number) { return half_to_float(number); }
    __device__ static void read_four(const u16* from, float* to) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        const u32 words[] = {two.x, two.y};
        widen(words, to);
    }
    __device__ static void widen(const u32* words, float* to) {
        for (int i = 0; i < 4; ++i) to[i] = half_to_float(u16(words[i / 2] >> 16 * (i % 2)));
    }
    __device__ static u16 rounded(float value) { return float_to_half(value); }
};

struct Int8Kept {
    typedef signed char Number;
    static constexpr bool SCALED = true;
    __device__ static float read(signed char code) { return float(code); }
    __device__ static void read_four(const signed char* from, float* to) { widen(reinterpret_cast<const u32*>(from), to); }
    __device__ static void widen(const u32* words, float* to) {
        // A byte is the last one of a float of 2^23 and more: so it need not be converted, which is slow.
        const u32 word = *words ^ 0x80808080;
        for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 + i)) - 8388736.f;
    }
    __device__ static signed char rounded(float shifted) {
        const float magic = 12582912.f;  // 1.5 * 2^23: the last bits of the sum are the nearest integer's
        return (signed char)(__float_as_uint(__fadd_rn(shifted, magic)) - __float_as_uint(magic));
    }
};

constexpr int MOST_PAIRS = 9;  // of a head that a lane has

// How queries grow with their positions: times 1 + growth * log(1 + floor((position + offset) / span)); a span of 0: none.
struct Warmth {
    int span, offset;
    float growth;
    __device__ float of(i64 position) const {
        return span ? 1 + growth * logf(1 + float((position + offset) / span)) : 1;
    }
};

// How heads are turned: where a row's tables begin among those of all embeddings, in elements, how many elements of a head
// they turn, the first ones, and the gains of what has been turned, f32[width], or 0.
struct Turning {
    i64 cosines, sines;
    u64 q_gain, k_gain;
    Warmth warmth;
    int size;
};

// Rotates the first half of what is turned of each head against its second; q stays where it is, k and v go to the blocks:
// either may be null, where the blocks have the layer's already, or the keys are the values. A warp per row and head of q, k
// and v.
template <class Format>
__device__ void rotate(float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,
                       const Place* places, void* keys, float* key_scales, void* values, float* value_scales, int own,
                       int tokens, int rows, int heads, int kv_heads, int width, const Turning& turning) {
    const int half = width / 2, turned = turning.size / 2, all = heads + (k ? kv_heads : 0) + (v ? kv_heads : 0);
    const int lane = threadIdx.x % WARP;
    // Of the elements that are not turned, the first half is taken with the second, too.
    const auto first_of = [&](int i) { return i < turned ? i : i + turned; };
    const auto second_of = [&](int i) { return i < turned ? i + turned : i + half; };
    const i64 row = warp_number() / all;
    const int head = int(warp_number() % all), kv = head < heads ? 0 : (head - heads) % kv_heads;
    if (row >= rows) return;
    const Place place = places[row];
    const int at = int(place.position);
    const bool asks = head < heads, tells = head >= heads + kv_heads;  // of q, of v
    const float* from = asks    ? q + row * q_stride + head * width
                        : tells ? v + row * v_stride + kv * width
                                : k + row * k_stride + kv * width;
    const float warm = turning.warmth.of(place.position);
    float first[MOST_PAIRS], second[MOST_PAIRS];
    u32 largest = 0;  // as bits, see Int8Scale
    for (int p = 0; p < MOST_PAIRS; ++p) {
        const int i = p * WARP + lane;
        if (i >= half) break;
        first[p] = from[first_of(i)], second[p] = from[second_of(i)];
        if (!tells && i < turned) {
            const i64 turn = i64(at) * turned + i;
            const float cosine = floats_at(place.turns)[turning.cosines + turn];
            const float sine = floats_at(place.turns)[turning.sines + turn];
            const float a = first[p], b = second[p];
            first[p] = a * cosine - b * sine;
            second[p] = b * cosine + a * sine;
        }
        if (asks && turning.warmth.span) first[p] *= warm, second[p] *= warm;
        if (const u64 gain = asks ? turning.q_gain : tells ? 0 : turning.k_gain)
            first[p] *= floats_at(gain)[first_of(i)], second[p] *= floats_at(gain)[second_of(i)];
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
            if (const int i = p * WARP + lane; i < half) to[first_of(i)] = first[p], to[second_of(i)] = second[p];
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
        to[first_of(i)] = Format::rounded(Format::SCALED ? __fmul_rn(finite ? first[p] : 0, inverse) : first[p]);
        to[second_of(i)] = Format::rounded(Format::SCALED ? __fmul_rn(finite ? second[p] : 0, inverse) : second[p]);
    }
}

#define ROTATE(name, Format)                                                                                           \
    extern "C" __global__ void name(float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,\
                                    const Place* places, void* keys, float* key_scales, void* values,                  \
                                    float* value_scales, int own, int tokens, int rows, int heads, int kv_heads,       \
                                    int width, Turning turning) {                                                      \
        wait_for_previous();                                                                                           \
        rotate<Format>(q, q_stride, k, k_stride, v, v_stride, places, keys, key_scales, values, value_scales, own,     \
                       tokens, rows, heads, kv_heads, width, turning);                                                 \
    }
