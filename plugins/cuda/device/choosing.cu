// Which positions rows see: those that an indexer scores best, by index keys of one head that lie in blocks as keys do
// (caches.cu), turned and written by `rotate`.
//
// A score is the sum of weight * max(product, 0) over heads: a product by fmaf, from the first element on; each of
// SCORING_WARPS sums has every so many-th head, and the sums are added in order. Of INT8 it is then multiplied by the key's
// scale. Heads may count alike, or each head chooses, and such a product is a score. So bits depend on a row and a position alone. A
// block of positions has the largest score of those up to a row's own. Of equal scores the earlier one is chosen.
//
// Where keys are pooled, the last position of a block has the block's key, and blocks have scores by these.
//
// What is chosen for a row, or for a KV head of it, is told as the blocks of one position each of a sequence that has no
// others, ascending: rows attend to those as to any. Where a row sees no more than may be chosen, these are all that it
// sees, and no score is read.

constexpr int SCORED = WARP;      // positions of a block that scores: a lane of each warp has one
constexpr int SCORING_WARPS = 4;
constexpr int INDEX_WIDTH = 256;  // elements of an index key at most

struct ScoringMemory {
    float keys[INDEX_WIDTH][SCORED + 1];
    float totals[SCORING_WARPS][SCORED];
};

// How a warp keeps the numbers of a row, the largest of whose magnitudes (as bits, see Int8Scale) each thread has of its own. All
// rows do it, as the first ones tell the tests' host whether threads meet.
template <class Format>
struct Narrowed {
    bool finite = true;
    float inverse = 1, scale = 0;
    __device__ explicit Narrowed(u32 largest) {
        if (!Format::SCALED) return;
        for (int distance = WARP / 2; distance; distance /= 2) {
            const float seen = __shfl_xor_sync(0xFFFFFFFF, __uint_as_float(largest), distance);
            largest = largest > __float_as_uint(seen) ? largest : __float_as_uint(seen);
        }
        const Int8Scale by(largest);
        finite = by.finite, inverse = by.inverse, scale = by.scale;
    }
    __device__ typename Format::Number of(float x) const {
        return Format::rounded(Format::SCALED ? __fmul_rn(finite ? x : 0, inverse) : x);
    }
};

// Rows of positions that end a block of `pool` get the block's key, f32[width] and as many zeros, in the place of their own key
// and gates. An element is the mean of those of the block, weighed with exp(gate - the largest gate), as they are cached but
// for the row's own; `pooling`, f32[pool, width], is added to gates. A warp per row.
template <class Format>
__device__ void pool_index(const float* k, int k_stride, const float* pooling, const Place* places, void* keys,
                           float* key_scales, int tokens, int rows, int width, int pool) {
    typedef typename Format::Number Number;
    const i64 row = warp_number();
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const Place place = places[row];
    const int first = int(place.position) + 1 - pool;
    const bool ends = (first + pool) % pool == 0;
    const float* own = k + row * k_stride;
    Number* kept = static_cast<Number*>(keys);
    const auto element = [&](int n, int column) {
        if (n == pool - 1) return own[column];
        const i64 cached = place.cached(first + n, 0, tokens, 0, 1);
        const float number = Format::read(kept[cached * 2 * width + column]);
        return Format::SCALED ? number * key_scales[cached] : number;
    };
    const auto gate = [&](int n, int column) { return element(n, width + column) + pooling[n * width + column]; };
    float pooled[INDEX_WIDTH / WARP];
    u32 largest = 0;  // as bits, see Int8Scale
    for (int p = 0; p < INDEX_WIDTH / WARP; ++p) {
        const int column = p * WARP + lane;
        if (!ends || column >= width) break;
        float most = gate(0, column), key = 0, total = 0;
        for (int n = 1; n < pool; ++n) most = fmaxf(most, gate(n, column));
        for (int n = 0; n < pool; ++n) {
            const float weight = expf(gate(n, column) - most);
            key = fmaf(weight, element(n, column), key), total += weight;
        }
        pooled[p] = key / total;
        const u32 bits = __float_as_uint(pooled[p]) & 0x7FFFFFFF;
        largest = largest > bits ? largest : bits;
    }
    const i64 cached = place.cached(first + pool - 1, 0, tokens, 0, 1);
    const Narrowed<Format> narrowed(largest);
    if (Format::SCALED && ends && lane == 0) key_scales[cached] = narrowed.scale;
    for (int p = 0; p < INDEX_WIDTH / WARP; ++p) {
        const int column = p * WARP + lane;
        if (!ends || column >= width) break;
        Number* to = kept + cached * 2 * width + column;
        to[0] = narrowed.of(pooled[p]);
        to[width] = Format::rounded(0);
    }
}

#define POOL_INDEX(name, Format)                                                                                       \
    extern "C" __global__ void name(const float* k, int k_stride, const float* pooling, const Place* places,           \
                                    void* keys, float* key_scales, int tokens, int rows, int width, int pool) {        \
        wait_for_previous();                                                                                           \
        pool_index<Format>(k, k_stride, pooling, places, keys, key_scales, tokens, rows, width, pool);                 \
    }

POOL_INDEX(pool_index_fp32, Fp32Kept)
POOL_INDEX(pool_index_fp16, Fp16Kept)
POOL_INDEX(pool_index_int8, Int8Kept)

// The same of keys that are means: the block's key, f32[width], in the place of the row's own, is the mean of those of the
// block, as they are cached but for the row's own, normed with `gain`, and turned as the block's first position is.
template <class Format>
__device__ void average_index(const float* k, int k_stride, const float* gain, const Place* places, void* keys,
                              float* key_scales, int tokens, int rows, int width, int pool, const Turning& turning,
                              float epsilon) {
    typedef typename Format::Number Number;
    const i64 row = warp_number();
    const int lane = threadIdx.x % WARP, half = width / 2, turned = turning.size / 2;
    if (row >= rows) return;
    const Place place = places[row];
    const int begin = int(place.position) + 1 - pool;
    const bool ends = (begin + pool) % pool == 0;
    const float* own = k + row * k_stride;
    Number* kept = static_cast<Number*>(keys);
    const auto mean = [&](int column) {
        float sum = 0;
        for (int n = 0; n < pool - 1; ++n) {
            const i64 cached = place.cached(begin + n, 0, tokens, 0, 1);
            const float number = Format::read(kept[cached * width + column]);
            sum += Format::SCALED ? number * key_scales[cached] : number;
        }
        return (sum + own[column]) / pool;
    };
    // Of the elements that are not turned, the first half is taken with the second, too, as `rotate` does it.
    const auto first_of = [&](int i) { return i < turned ? i : i + turned; };
    const auto second_of = [&](int i) { return i < turned ? i + turned : i + half; };
    float first[INDEX_WIDTH / 2 / WARP], second[INDEX_WIDTH / 2 / WARP], squares = 0;
    for (int p = 0; p < INDEX_WIDTH / 2 / WARP; ++p) {
        const int i = p * WARP + lane;
        if (!ends || i >= half) break;
        first[p] = mean(first_of(i)), second[p] = mean(second_of(i));
        squares = fmaf(first[p], first[p], fmaf(second[p], second[p], squares));
    }
    const float scale = 1 / sqrtf(warp_sum(squares) / width + epsilon);  // of all rows, as in `pool_index`
    u32 largest = 0;
    for (int p = 0; p < INDEX_WIDTH / 2 / WARP; ++p) {
        const int i = p * WARP + lane;
        if (!ends || i >= half) break;
        const float a = first[p] * scale * gain[first_of(i)], b = second[p] * scale * gain[second_of(i)];
        first[p] = a, second[p] = b;
        if (i < turned) {
            const i64 turn = i64(begin) * turned + i;
            const float cosine = floats_at(place.turns)[turning.cosines + turn];
            const float sine = floats_at(place.turns)[turning.sines + turn];
            first[p] = a * cosine - b * sine, second[p] = b * cosine + a * sine;
        }
        const u32 one = __float_as_uint(first[p]) & 0x7FFFFFFF, other = __float_as_uint(second[p]) & 0x7FFFFFFF;
        largest = largest > one ? largest : one;
        largest = largest > other ? largest : other;
    }
    const i64 cached = place.cached(ends ? begin + pool - 1 : int(place.position), 0, tokens, 0, 1);
    const Narrowed<Format> narrowed(largest);
    if (Format::SCALED && ends && lane == 0) key_scales[cached] = narrowed.scale;
    Number* to = kept + cached * width;
    for (int p = 0; p < INDEX_WIDTH / 2 / WARP; ++p) {
        const int i = p * WARP + lane;
        if (!ends || i >= half) break;
        to[first_of(i)] = narrowed.of(first[p]);
        to[second_of(i)] = narrowed.of(second[p]);
    }
}

#define AVERAGE_INDEX(name, Format)                                                                                    \
    extern "C" __global__ void name(const float* k, int k_stride, const float* gain, const Place* places, void* keys,  \
                                    float* key_scales, int tokens, int rows, int width, int pool, Turning turning,     \
                                    float epsilon) {                                                                   \
        wait_for_previous();                                                                                           \
        average_index<Format>(k, k_stride, gain, places, keys, key_scales, tokens, rows, width, pool, turning,         \
                              epsilon);                                                                                \
    }

AVERAGE_INDEX(average_index_fp32, Fp32Kept)
AVERAGE_INDEX(average_index_fp16, Fp16Kept)
AVERAGE_INDEX(average_index_int8, Int8Kept)

// scores: f32[rows, lists, room], of the positions up to a row's own, or of the blocks of `pool` that end up to it; a list is of
// each head where they choose `apart`, or of all. `kept`: elements of a row of the cache.
template <class Format>
__device__ void score_index(const float* q, int q_stride, const float* weights, int weights_stride, const Place* places,
                            const void* keys, const float* key_scales, int tokens, float* scores, int heads, int width,
                            int kept, int apart, int count, int room, int pool) {
    ScoringMemory& memory = shared_memory<ScoringMemory>();
    const int chunks = (room + SCORED - 1) / SCORED, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 row = blockIdx.x / chunks;
    const int first = int(blockIdx.x % chunks) * SCORED, at = first + lane;
    const Place place = places[row];
    const int last = (int(place.position) + 1) / pool - 1;
    const bool is_scored = place.position >= count && first <= last;
    const int cached = is_scored ? int(place.cached((at < last ? at : last) * pool + pool - 1, 0, tokens, 0, 1)) : 0;
    for (int position = warp; is_scored && position < SCORED; position += SCORING_WARPS) {
        const auto* from = static_cast<const typename Format::Number*>(keys) + i64(of_lane(cached, position)) * kept;
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
        if (!apart) total = fmaf(weights ? weights[row * weights_stride + head] : 1, fmaxf(product, 0), total);
        else if (at <= last)
            scores[(row * heads + head) * room + at] = Format::SCALED ? product * key_scales[cached] : product;
    }
    if (apart) return;
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
                                    float* scores, int heads, int width, int kept, int apart, int count, int room,     \
                                    int pool) {                                                                        \
        wait_for_previous();                                                                                           \
        score_index<Format>(q, q_stride, weights, weights_stride, places, keys, key_scales, tokens, scores, heads,     \
                            width, kept, apart, count, room, pool);                                                    \
    }

SCORE_INDEX(score_index_fp32, Fp32Kept)
SCORE_INDEX(score_index_fp16, Fp16Kept)
SCORE_INDEX(score_index_int8, Int8Kept)

constexpr float LARGEST = -LOWEST;
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

// scores: of each list, which is a KV head's, a number for each position; the kernel overwrites that at `b * together` with the
// best of block b's. Where keys are `pooled`, scores[b] is block b's from the beginning: only whole blocks are chosen from, and
// what follows the last of these is seen besides.
// slots: i32[rows, count], the address of where the chosen positions' keys are among all; `chosen`: rows that have these as
// their blocks. A block of threads per row.
extern "C" __global__ void choose_positions(float* scores, int scores_stride, const Place* places, int tokens, int kv_head,
                                            int kv_heads, u64 slots, Place* chosen, int count, int together, int latest,
                                            int pooled) {
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
        for (int at = thread; at < positions; at += CHOOSING) to[at] = int(place.cached(at, 0, tokens, kv_head, kv_heads));
        return;
    }
    const int blocks = (positions + (pooled ? 0 : together - 1)) / together, most = count / together;
    const int apart = pooled ? 1 : together;  // of scores of blocks
    float* from = scores + row * scores_stride;
    for (int at = thread; apart > 1 && at < blocks; at += CHOOSING) {
        float* first = from + at * together;
        for (int i = 1; i < together && at * together + i < positions; ++i) *first = fmaxf(*first, first[i]);
        if (at >= blocks - latest) *first = LARGEST;
    }
    __syncthreads();
    const int behind = pooled ? positions - blocks * together : 0;
    for (int at = thread; at < behind; at += CHOOSING)
        to[most * together + at] = int(place.cached(blocks * together + at, 0, tokens, kv_head, kv_heads));
    if (pooled && thread == 0) chosen[row].position = most * together + behind - 1;
    u32 least = 0;  // that is chosen, bit by bit
    for (u32 bit = 0x80000000; bit; bit >>= 1) {
        int enough = 0;
        for (int at = thread; at < blocks; at += CHOOSING) enough += ordered(from[at * apart]) >= (least | bit);
        if (count_of_block(memory, enough) >= most) least |= bit;
    }
    const int each = (blocks + CHOOSING - 1) / CHOOSING, begin = thread * each;
    const int end = begin + each < blocks ? begin + each : blocks;
    int larger = 0, equal = 0;
    for (int at = begin; at < end; ++at) {
        const u32 score = ordered(from[at * apart]);
        larger += score > least, equal += score == least;
    }
    memory.larger[thread] = larger, memory.equal[thread] = equal;
    __syncthreads();
    int of_all = 0, before = 0, equal_before = 0;  // those that are larger, and of threads before this one
    for (int other = 0; other < CHOOSING; ++other) {
        of_all += memory.larger[other];
        if (other < thread) before += memory.larger[other], equal_before += memory.equal[other];
    }
    const int most_equal = most - of_all;
    to += (before + (equal_before < most_equal ? equal_before : most_equal)) * together;
    for (int at = begin; at < end; ++at) {
        const u32 score = ordered(from[at * apart]);
        if (!(score > least || (score == least && equal_before++ < most_equal))) continue;
        const int first = at * together, last = first + together < positions ? first + together : positions;
        for (int own = first; own < last; ++own) *to++ = int(place.cached(own, 0, tokens, kv_head, kv_heads));
        if (last < first + together) chosen[row].position -= first + together - last;  // only the last block may be begun
    }
}
