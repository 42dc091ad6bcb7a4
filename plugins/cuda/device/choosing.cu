// Which positions rows see: those that an indexer scores best, by index keys of one head that lie in blocks as keys do
// (caches.cu), turned and written by `rotate`.
//
// A score is the sum of weight * max(product, 0) over heads: a product by fmaf, from the first element on; each of
// SCORING_WARPS sums has every so many-th head, and the sums are added in order. Of INT8 it is then multiplied by the key's
// scale. So bits depend on a row and a position alone. Of equal scores the earlier position is chosen.
//
// What is chosen for a row is told as the blocks of one position each of a sequence that has no others, ascending: rows
// attend to those as to any. Where a row sees no more than may be chosen, these are all that it sees, and no score is read.

constexpr int SCORED = WARP;      // positions of a block that scores: a lane of each warp has one
constexpr int SCORING_WARPS = 4;
constexpr int INDEX_WIDTH = 256;  // elements of an index key at most

struct ScoringMemory {
    float keys[INDEX_WIDTH][SCORED + 1];
    float totals[SCORING_WARPS][SCORED];
};

// scores: f32[rows, room], of the positions up to a row's own.
template <class Format>
__device__ void score_index(const float* q, int q_stride, const float* weights, int weights_stride, const Place* places,
                            const void* keys, const float* key_scales, int tokens, float* scores, int heads, int width,
                            int count, int room) {
    ScoringMemory& memory = shared_memory<ScoringMemory>();
    const int chunks = (room + SCORED - 1) / SCORED, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 row = blockIdx.x / chunks;
    const int first = int(blockIdx.x % chunks) * SCORED, at = first + lane;
    const Place place = places[row];
    const int last = int(place.position);
    const bool is_scored = last >= count && first <= last;
    const int cached = int(place.cached(at < last ? at : last, 0, tokens, 0, 1));
    for (int position = warp; is_scored && position < SCORED; position += SCORING_WARPS) {
        const auto* from = static_cast<const typename Format::Number*>(keys) + i64(of_lane(cached, position)) * width;
        for (int column = lane; column < width; column += WARP) memory.keys[column][position] = Format::read(from[column]);
    }
    __syncthreads();
    if (!is_scored) return;
    float total = 0;
    for (int head = warp; head < heads; head += SCORING_WARPS) {
        const float* query = q + row * q_stride + head * width;
        float product = 0;
#pragma unroll 8
        for (int column = 0; column < width; ++column) product = fmaf(query[column], memory.keys[column][lane], product);
        total = fmaf(weights[row * weights_stride + head], fmaxf(product, 0), total);
    }
    memory.totals[warp][lane] = total;
    __syncthreads();
    if (warp || at > last) return;
    total = 0;
    for (int other = 0; other < SCORING_WARPS; ++other) total += memory.totals[other][lane];
    scores[row * room + at] = Format::SCALED ? total * key_scales[cached] : total;
}

#define SCORE_INDEX(name, Format)                                                                                      \
    extern "C" __global__ void name(const float* q, int q_stride, const float* weights, int weights_stride,            \
                                    const Place* places, const void* keys, const float* key_scales, int tokens,        \
                                    float* scores, int heads, int width, int count, int room) {                        \
        wait_for_previous();                                                                                           \
        score_index<Format>(q, q_stride, weights, weights_stride, places, keys, key_scales, tokens, scores, heads,     \
                            width, count, room);                                                                       \
    }

SCORE_INDEX(score_index_fp32, Fp32Kept)
SCORE_INDEX(score_index_fp16, Fp16Kept)
SCORE_INDEX(score_index_int8, Int8Kept)

constexpr int CHOOSING = 128;  // threads of a block that chooses

struct ChoosingMemory {
    float of_warps[CHOOSING / WARP];
    int larger[CHOOSING], equal[CHOOSING];
};

// A number that is larger where a float is.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.f);  // of -0, 0
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The sum over all threads of a block of numbers that are small enough together to be whole as floats.
__device__ inline int count_of_block(ChoosingMemory& memory, int own) {
    const float of_warp = warp_sum(float(own));
    __syncthreads();  // the count before is read
    if (threadIdx.x % WARP == 0) memory.of_warps[threadIdx.x / WARP] = of_warp;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < CHOOSING / WARP; ++warp) total += memory.of_warps[warp];
    return int(total);
}

// slots: i32[rows, count], the address of where the chosen positions' keys are among all; `chosen`: rows that have these as
// their blocks. A block of threads per row.
extern "C" __global__ void choose_positions(const float* scores, const Place* places, int tokens, u64 slots, Place* chosen,
                                            int count, int room) {
    wait_for_previous();
    ChoosingMemory& memory = shared_memory<ChoosingMemory>();
    const int thread = threadIdx.x;
    const i64 row = blockIdx.x;
    const Place place = places[row];
    const int positions = int(place.position) + 1;
    const u64 own = slots + row * count * sizeof(int);
    int* to = reinterpret_cast<int*>(floats_at(own));
    if (thread == 0) {
        Place of_row = place;
        of_row.blocks[0] = of_row.blocks[1] = own;
        of_row.position = (positions < count ? positions : count) - 1;
        of_row.before = of_row.after = 0;
        chosen[row] = of_row;
    }
    __syncthreads();  // of all blocks, as the first one tells the tests' host whether blocks meet
    if (positions <= count) {
        for (int at = thread; at < positions; at += CHOOSING) to[at] = int(place.cached(at, 0, tokens, 0, 1));
        return;
    }
    const float* from = scores + row * room;
    u32 least = 0;  // that is chosen, bit by bit
    for (u32 bit = 0x80000000; bit; bit >>= 1) {
        int enough = 0;
        for (int at = thread; at < positions; at += CHOOSING) enough += ordered(from[at]) >= (least | bit);
        if (count_of_block(memory, enough) >= count) least |= bit;
    }
    const int each = (positions + CHOOSING - 1) / CHOOSING, begin = thread * each;
    const int end = begin + each < positions ? begin + each : positions;
    int larger = 0, equal = 0;
    for (int at = begin; at < end; ++at) {
        const u32 score = ordered(from[at]);
        larger += score > least, equal += score == least;
    }
    memory.larger[thread] = larger, memory.equal[thread] = equal;
    __syncthreads();
    int of_all = 0, before = 0, equal_before = 0;  // those that are larger, and of threads before this one
    for (int other = 0; other < CHOOSING; ++other) {
        of_all += memory.larger[other];
        if (other < thread) before += memory.larger[other], equal_before += memory.equal[other];
    }
    const int most_equal = count - of_all;
    to += before + (equal_before < most_equal ? equal_before : most_equal);
    for (int at = begin; at < end; ++at) {
        const u32 score = ordered(from[at]);
        if (score > least || (score == least && equal_before++ < most_equal))
            *to++ = int(place.cached(at, 0, tokens, 0, 1));
    }
}
