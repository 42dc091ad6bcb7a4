// Attention: y[rows, heads * width] = softmax(q keys^T) values, of rows as in caches.cu and of what these see.
//
// A row's positions are cut in parts at multiples of PART, and these in chunks at multiples of CHUNK. In a part, chunk
// follows chunk: weights are by the largest score so far, and the sums before are shrunk by that before the chunk's own are
// added. Parts are computed apart and added up in order, either by the block that has them all or by `combine`. So bits
// depend on what a row sees alone: not on the rows that it shares a block with, nor on who adds up its parts.
//
// A block of `attend_tile` has a tile: neighbouring rows of one sequence, with all query heads of a key's head or with some of
// many. Keys and values come through memory that its threads share, a slice of a chunk's heads after the other, several
// ahead. Where every row is of another sequence, a block of `attend_row` has some heads of one, and each of its warps a chunk of
// the part that they have together.

constexpr int CHUNK = 32;       // positions whose weights are found together
constexpr int PART = 256;       // positions that are added up by themselves: whole chunks
constexpr int SLICE = 64;       // elements of heads that are in shared memory together
constexpr int ATTENDING = 128;  // threads of a block, in which warps have halves of a tile's queries and of something else
constexpr int BLOCKS = 4;       // of a multiprocessor, for which there shall be registers
constexpr int FEWEST = 8;       // queries of a tile that keeps every thread busy
constexpr int SUMS = 4;         // of a score: of every fourth element each
constexpr int WIDEST = 576;     // elements of a head
constexpr int ROW_HEADS = 2;    // of a block that has one row
constexpr int ROW_WARPS = PART / CHUNK, ROW_THREADS = ROW_WARPS * WARP;  // of such a block
constexpr int STRIP_COPIES = 8;  // of 16 bytes of a head, that a warp of it has of a chunk at a time

// How far rows see: so many positions, or those of their own chunk; 0: all.
struct Reach {
    int window, chunk;
};

// The positions that a row sees, and the parts that these are in.
struct Seen {
    int start = 0, stop = 0;
    __device__ Seen() {}
    __device__ Seen(i64 position, Reach reach) {
        stop = int(position) + 1;
        start = reach.window && stop > reach.window ? stop - reach.window : 0;
        if (reach.chunk) start = int(position) / reach.chunk * reach.chunk;
    }
    __device__ bool has(int position) const { return start <= position && position < stop; }
    __device__ bool has_part(int number) const { return start < (number + 1) * PART && number * PART < stop; }
    __device__ int first_part() const { return start / PART; }
    __device__ int parts() const { return (stop - 1) / PART - start / PART + 1; }
};

// What has been added up of a row's parts, but for the values: the largest score, and the sum of all weights by it. A sink
// is a score without a value.
struct Softmax {
    float largest = LOWEST, total = 0;
    __device__ void begin(const float* sink) { largest = *sink, total = 1; }
    // Adds a part: the sums before are to be multiplied by `keep`, those of the part by `grow`.
    __device__ void add(float part_largest, float part_total, float& keep, float& grow) {
        const float higher = fmaxf(largest, part_largest);
        keep = expf(largest - higher), grow = expf(part_largest - higher);
        total = fmaf(part_total, grow, total * keep);
        largest = higher;
    }
};

// What all blocks of a launch are given. They have all parts of their rows if `partials` is null, else one each of at most
// `room`: f32[rows, heads, room, width + 4] with the sums of values, the largest score and the sum of weights. With a cap, a
// score s becomes cap * tanh(s / cap). A tile has `units` blocks. There are so many tiles, each of `stride` rows but for the
// last one; if that is 1, each row may be the last one of a tile or not.
struct Attending {
    const float* q;
    int q_stride;
    const Place* places;
    const void *keys, *values;
    const float *key_scales, *value_scales;
    int own, tokens;
    float* partials;
    const float* sinks;
    float* y;
    int y_stride, rows, heads, kv_heads, width;
    float scale, cap;
    Reach reach;
    int room, units, tiles, stride;

    __device__ float* partial(int row, int head, int part) const {
        return partials + ((i64(row) * heads + head) * room + part) * (width + 4);
    }
};

// Rows of one sequence, and some of their heads that have the same keys: query i is of row i / together.
struct QueryTile {
    int first_row, rows, first_head, together, kv_head;
    Place last;  // of its last row
    __device__ int queries() const { return rows * together; }
    __device__ int row_of(int query) const { return query / together; }
    __device__ int head_of(int query) const { return first_head + query % together; }
    __device__ Seen seen(int row, Reach reach) const { return Seen(last.position - (rows - 1 - row), reach); }
};

// A slice of a chunk's keys or values as they are kept; no two of eight neighbours begin in the same bank. With the last
// slice of keys come the scales of all keys, and of all values.
template <class Format>
struct alignas(16) Kept {
    static constexpr int RUN = 16 / int(sizeof(typename Format::Number));  // numbers of a copy
    typename Format::Number numbers[CHUNK][SLICE + RUN];
    float scales[Format::SCALED ? 2 * CHUNK : 4];
};

// The memory of a block that has up to QUERIES of heads of up to SLICES.
template <class Format, int SLICES, int QUERIES_, int STAGES_>
struct AttentionMemory {
    static constexpr int QUERIES = QUERIES_, STAGES = STAGES_;
    Kept<Format> stages[STAGES];
    float queries[QUERIES][SLICES * SLICE + 4];
    float weights[CHUNK][QUERIES + 4];  // at first scores
    float shrink[QUERIES];              // by what sums are multiplied: those of the chunks before,
    float keep[QUERIES], grow[QUERIES], inverse[QUERIES];  // those of the parts before, those of a part, and in the end
};

// Copies slices of a tile's keys and values in the order in which they are used: of each chunk the keys', then the values'.
// What is behind the end of heads becomes zeros, and so does what is at positions that are not asked for.
template <class Format, int STAGES>
struct Slices {
    typedef typename Format::Number Number;
    static constexpr int RUN = Kept<Format>::RUN, RUNS = SLICE / RUN, ROWS = ATTENDING / RUNS;
    Kept<Format> (&stages)[STAGES];
    const Attending& of;
    const QueryTile& tile;
    int from, to, count;              // positions; slices of a head
    int chunk, slice, stage;          // that are copied next
    int cached, heads[CHUNK / ROWS];  // numbers of the heads of the lane's position, and of those that the thread copies

    __device__ Slices(Kept<Format> (&stages)[STAGES], const Attending& of, const QueryTile& tile, int from, int to)
        : stages(stages), of(of), tile(tile), from(from), to(to), count((of.width + SLICE - 1) / SLICE),
          chunk(from / CHUNK * CHUNK), slice(0), stage(0), cached(0) {}

    // Begins to copy the next slice, if there is any.
    __device__ void copy() {
        if (chunk < to) {
            if (slice == 0) find_heads();
            const void* kept = slice < count ? of.keys : of.values;
            copy_slice(stages[stage], static_cast<const Number*>(kept), (slice < count ? slice : slice - count) * SLICE);
            if (Format::SCALED && slice == count - 1 && threadIdx.x < 2 * WARP)
                copy_async<4>(&stages[stage].scales[threadIdx.x],
                              (threadIdx.x < WARP ? of.key_scales : of.value_scales) + cached, true);
            if (++slice == 2 * count) slice = 0, chunk += CHUNK;
        }
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    __device__ void find_heads() {
        const int at = chunk + int(threadIdx.x) % WARP, near = at < from ? from : at < to ? at : to - 1;
        cached = int(tile.last.cached(near, of.own, of.tokens, tile.kv_head, of.kv_heads));
#pragma unroll
        for (int i = 0; i < CHUNK / ROWS; ++i) heads[i] = of_lane(cached, i * ROWS + int(threadIdx.x) / RUNS);
    }

    __device__ void copy_slice(Kept<Format>& to_stage, const Number* kept, int column) {
        if (of.width % RUN == 0) {
            const int run = int(threadIdx.x) % RUNS * RUN;
#pragma unroll
            for (int i = 0; i < CHUNK / ROWS; ++i) {
                const int at = i * ROWS + int(threadIdx.x) / RUNS;
                const bool there = from <= chunk + at && chunk + at < to && column + run < of.width;
                copy_async<16>(&to_stage.numbers[at][run], there ? kept + i64(heads[i]) * of.width + column + run : kept,
                               there);
            }
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < CHUNK * SLICE; i += ATTENDING) {
                const int at = i / SLICE, own = i % SLICE, number = of_lane(cached, at);
                const bool there = from <= chunk + at && chunk + at < to && column + own < of.width;
                to_stage.numbers[at][own] = there ? kept[i64(number) * of.width + column + own] : Number(0);
            }
        }
    }
};

// One tile's attention to the positions from `from` on up to `to`.
template <class Format, int SLICES, class Memory>
__device__ void attend_tile(Memory& memory, const Attending& of, const QueryTile& tile, int from, int to) {
    constexpr int QUERIES = Memory::QUERIES, STAGES = Memory::STAGES, OWN = QUERIES / FEWEST;
    const int thread = threadIdx.x, lane = thread % WARP, half = thread / WARP / 2, other_half = thread / WARP % 2;
    Slices<Format, STAGES> slices(memory.stages, of, tile, from, to);
    int stage = STAGES - 1;
    const auto next_stage = [&]() -> const Kept<Format>& {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // everybody's have come, and the stage before is done with
        slices.copy();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return memory.stages[stage];
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) slices.copy();

    for (int query = thread / WARP; query < tile.queries(); query += ATTENDING / WARP) {
        const float* own = of.q + i64(tile.first_row + tile.row_of(query)) * of.q_stride + tile.head_of(query) * of.width;
#pragma unroll 4
        for (int column = lane; column < slices.count * SLICE; column += WARP)
            memory.queries[query][column] = column < of.width ? own[column] : 0;
    }

    // While weights are found, some neighbouring threads have a query, of which each has every SHARING-th position.
    constexpr int SHARING = ATTENDING / QUERIES, POSITIONS = CHUNK / SHARING;
    const int weighed = thread / SHARING, member = thread % SHARING;
    const Seen seen = weighed < tile.queries() ? tile.seen(tile.row_of(weighed), of.reach) : Seen();
    Softmax row, part;  // of a part of which chunks are added up
    if (of.sinks && weighed < tile.queries()) row.begin(of.sinks + tile.head_of(weighed));

    // Of scores, a thread has those of OWN queries, the first of which is this, by two positions; of sums of values, those of
    // OWN neighbouring queries by four elements of each slice.
    const int scored = half * 4 + lane / 8, position = other_half * 16 + lane % 8;
    const int summed = scored * OWN, element = (other_half * 8 + lane % 8) * 4;
    float sums[SLICES][OWN][4] = {};

    for (int first = from / CHUNK * CHUNK; first < to; first += CHUNK) {
        float scores[OWN][2][SUMS] = {};
        for (int slice = 0; slice < slices.count; ++slice) {
            const Kept<Format>& keys_of = next_stage();
            const int columns = of.width - slice * SLICE < SLICE ? of.width - slice * SLICE : SLICE;
            if (half * 4 >= tile.queries()) continue;  // of the whole warp
#pragma unroll (OWN == 1 ? 8 : 4)
            for (int column = 0; column < columns; column += SUMS) {
                float keys[2][SUMS], query[SUMS];
#pragma unroll
                for (int j = 0; j < 2; ++j) Format::read_four(&keys_of.numbers[position + 8 * j][column], keys[j]);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    read_run<SUMS>(&memory.queries[i * FEWEST + scored][slice * SLICE + column], query);
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int e = 0; e < SUMS; ++e) scores[i][j][e] = fmaf(query[e], keys[j][e], scores[i][j][e]);
                }
            }
        }
        const Kept<Format>& scaled = memory.stages[stage];
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float* four = scores[i][j];
                float score = ((four[0] + four[1]) + (four[2] + four[3])) * of.scale;
                if (Format::SCALED) score *= scaled.scales[position + 8 * j];
                memory.weights[position + 8 * j][i * FEWEST + scored] = score;
            }
        __syncthreads();
        if (of.cap != 0)
#pragma unroll 1
            for (int at = member; at < CHUNK; at += SHARING)
                memory.weights[at][weighed] = tanhf(memory.weights[at][weighed] / of.cap) * of.cap;

        float weights[POSITIONS], higher = part.largest;
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            weights[p] = memory.weights[p * SHARING + member][weighed];
            if (seen.has(first + p * SHARING + member)) higher = fmaxf(higher, weights[p]);
        }
#pragma unroll
        for (int distance = SHARING / 2; distance; distance /= 2)
            higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFF, higher, distance));
        const float shrink = expf(part.largest - higher);
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            const int at = p * SHARING + member;
            const bool counts = seen.has(first + at);
            weights[p] = counts ? expf(weights[p] - higher) : 0;
            memory.weights[at][weighed] = Format::SCALED && counts ? weights[p] * scaled.scales[CHUNK + at] : weights[p];
        }
        if (member == 0) memory.shrink[weighed] = shrink;
        // The same tree for every number of threads that have a query.
#pragma unroll
        for (int distance = POSITIONS / 2; distance; distance /= 2)
#pragma unroll
            for (int p = 0; p < distance; ++p) weights[p] += weights[p + distance];
        float total = weights[0];
#pragma unroll
        for (int distance = SHARING / 2; distance; distance /= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, distance);
        part.total = fmaf(part.total, shrink, total);
        part.largest = higher;

        const int begin = from > first ? from - first : 0, end = to - first < CHUNK ? to - first : CHUNK;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice >= slices.count) break;
            const Kept<Format>& values_of = next_stage();
            if (half * 4 * OWN >= tile.queries()) continue;
            float of_chunk[OWN][4] = {};
#pragma unroll (OWN == 1 ? 8 : 4)
            for (int at = begin; at < end; ++at) {
                float values[4], weight[OWN];
                Format::read_four(&values_of.numbers[at][element], values);
                read_run<OWN>(&memory.weights[at][summed], weight);
#pragma unroll
                for (int i = 0; i < OWN; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) of_chunk[i][e] = fmaf(weight[i], values[e], of_chunk[i][e]);
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[slice][i][e] = fmaf(sums[slice][i][e], memory.shrink[summed + i], of_chunk[i][e]);
        }

        const bool ends = first + CHUNK >= to;
        if (!ends && (first + CHUNK) % PART) continue;
        const int number = first / PART;
        if (member == 0 && !of.partials) {
            row.add(part.largest, part.total, memory.keep[weighed], memory.grow[weighed]);
            memory.inverse[weighed] = ends ? 1 / row.total : 1;
        } else if (member == 0) {
            memory.keep[weighed] = 0, memory.grow[weighed] = memory.inverse[weighed] = 1;
            if (seen.has_part(number)) {
                float* out = of.partial(tile.first_row + tile.row_of(weighed), tile.head_of(weighed),
                                        number - seen.first_part()) + of.width;
                out[0] = part.largest, out[1] = part.total;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int query = summed + i;
            if (query >= tile.queries()) break;
            const int of_row = tile.first_row + tile.row_of(query), head = tile.head_of(query);
            const Seen own = tile.seen(tile.row_of(query), of.reach);
            if (of.partials && !own.has_part(number)) continue;
            float* out = of.partials ? of.partial(of_row, head, number - own.first_part())
                                     : of.y + i64(of_row) * of.y_stride + head * of.width;
            const bool begins = of.partials || number == from / PART;
            const float keep = memory.keep[query], grow = memory.grow[query], inverse = memory.inverse[query];
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = slice * SLICE + element + e;
                    if (column >= of.width) continue;
                    const float before = begins ? 0 : out[column];
                    out[column] = fmaf(sums[slice][i][e], grow, before * keep) * inverse;
                }
        }
        part = Softmax();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[slice][i][e] = 0;
    }
}

// The memory of a block, for few queries or for many: the fewer there are, the more slices are under way.
template <class Format, int SLICES, int QUERIES>
union BlockMemory {
    typedef AttentionMemory<Format, SLICES, QUERIES, 3> Many;
    typedef AttentionMemory<Format, SLICES, FEWEST, 1> Least;
    typedef AttentionMemory<Format, SLICES, FEWEST, 1 + int((sizeof(Many) - sizeof(Least)) / sizeof(Kept<Format>))> Few;
    Many many;
    Few few;
};

// Blocks have tiles of up to QUERIES. Neighbours have other heads of the same rows; the last rows, which see most, come first.
template <class Format, int SLICES, int QUERIES>
__device__ void attend(const Attending& of) {
    BlockMemory<Format, SLICES, QUERIES>& memory = shared_memory<BlockMemory<Format, SLICES, QUERIES>>();
    const int unit = int(blockIdx.x % u32(of.units)), number = int(blockIdx.x / u32(of.units));
    const int part = int(u32(number) / u32(of.tiles)), stop = (of.tiles - (number - part * of.tiles)) * of.stride;
    const int last = (stop < of.rows ? stop : of.rows) - 1;
    const int group = of.heads / of.kv_heads, pieces = (group + QUERIES - 1) / QUERIES;
    const int most_rows = pieces > 1 ? 1 : QUERIES / group;
    QueryTile tile;
    tile.last = of.places[last];
    if ((tile.last.before + 1) % most_rows && tile.last.after && last + 1 < of.rows) return;
    const int rows = tile.last.before % most_rows + 1, piece = unit % pieces * QUERIES;
    tile.rows = rows < last + 1 ? rows : last + 1;
    tile.first_row = last + 1 - tile.rows;
    tile.kv_head = unit / pieces;
    tile.first_head = tile.kv_head * group + piece;
    tile.together = group - piece < QUERIES ? group - piece : QUERIES;
    int from = tile.seen(0, of.reach).start, to = int(tile.last.position) + 1;
    if (of.partials) {
        const int begin = (from / PART + part) * PART;
        if (begin >= to) return;
        if (from < begin) from = begin;
        if (to > begin + PART) to = begin + PART;
    }
    if constexpr (QUERIES > FEWEST)
        if (tile.queries() > FEWEST) return attend_tile<Format, SLICES>(memory.many, of, tile, from, to);
    attend_tile<Format, SLICES>(memory.few, of, tile, from, to);
}

// What the threads of a block share that has heads of one row.
struct RowMemory {
    union {
        uint4 keys[ROW_WARPS][CHUNK][STRIP_COPIES + 1];  // a strip: no two of eight neighbours begin in the same bank
        float sums[ROW_WARPS][ROW_HEADS][WIDEST];        // of the values of each chunk, when all scores are known
    };
    alignas(16) float queries[ROW_HEADS][WIDEST];
    float weights[ROW_WARPS][CHUNK][ROW_HEADS];
    float largest[ROW_WARPS][ROW_HEADS], shrink[ROW_WARPS][ROW_HEADS], totals[ROW_WARPS][ROW_HEADS];  // of each chunk
};

// What a lane's position scores by each head of a row. `cached`: the numbers of the heads of the lanes' positions.
template <class Format>
__device__ inline void find_scores(RowMemory& memory, const Attending& of, int cached, float (&scores)[ROW_HEADS]) {
    typedef typename Format::Number Number;
    constexpr int RUN = Kept<Format>::RUN, STRIP = STRIP_COPIES * RUN;  // numbers
    constexpr int AT_ONCE = WARP / STRIP_COPIES, COPIES = CHUNK / AT_ONCE, WORDS = SUMS * int(sizeof(Number)) / 4;
    const int lane = threadIdx.x % WARP, copier = lane / STRIP_COPIES, copy = lane % STRIP_COPIES, run = copy * RUN;
    auto& keys = memory.keys[threadIdx.x / WARP];
    const Number* kept[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
        kept[i] = static_cast<const Number*>(of.keys) + i64(of_lane(cached, i * AT_ONCE + copier)) * of.width + run;
    uint4 next[COPIES] = {};
    const auto read = [&](int column) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i)
            if (column + run < of.width) next[i] = *reinterpret_cast<const uint4*>(kept[i] + column);
    };
    float sums[ROW_HEADS][SUMS] = {};
    read(0);
    for (int column = 0; column < of.width; column += STRIP) {
        __syncwarp();  // the strip before is read
#pragma unroll
        for (int i = 0; i < COPIES; ++i) keys[i * AT_ONCE + copier][copy] = next[i];
        __syncwarp();
        if (column + STRIP < of.width) read(column + STRIP);
        const int columns = of.width - column < STRIP ? of.width - column : STRIP;
#pragma unroll 2
        for (int i = 0; i < columns; i += RUN) {
            const uint4 four = keys[lane][i / RUN];
            const u32 words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < RUN; j += SUMS) {
                float key[SUMS], query[SUMS];
                Format::widen(words + j / SUMS * WORDS, key);
#pragma unroll
                for (int head = 0; head < ROW_HEADS; ++head) {
                    read_run<SUMS>(&memory.queries[head][column + i + j], query);
#pragma unroll
                    for (int e = 0; e < SUMS; ++e) sums[head][e] = fmaf(query[e], key[e], sums[head][e]);
                }
            }
        }
    }
#pragma unroll
    for (int head = 0; head < ROW_HEADS; ++head) {
        const float* four = sums[head];
        scores[head] = ((four[0] + four[1]) + (four[2] + four[3])) * of.scale;
        if (Format::SCALED) scores[head] *= of.key_scales[cached];
        if (of.cap != 0) scores[head] = tanhf(scores[head] / of.cap) * of.cap;
    }
}

// The sums of a chunk's values from its position `begin` on up to `end`, by their weights.
template <class Format>
__device__ inline void add_values(RowMemory& memory, const Attending& of, int cached, int begin, int end) {
    typedef typename Format::Number Number;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int first = 0; first < of.width; first += 4 * WARP) {
        const int column = first + lane * 4;
        const Number* kept = static_cast<const Number*>(of.values) + (column < of.width ? column : 0);
        float sums[ROW_HEADS][4] = {};
#pragma unroll 8
        for (int at = begin; at < end; ++at) {
            float values[4], weight[ROW_HEADS];
            Format::read_four(kept + i64(of_lane(cached, at)) * of.width, values);
            read_run<ROW_HEADS>(memory.weights[warp][at], weight);
#pragma unroll
            for (int head = 0; head < ROW_HEADS; ++head)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[head][e] = fmaf(weight[head], values[e], sums[head][e]);
        }
#pragma unroll
        for (int head = 0; head < ROW_HEADS; ++head)
            if (column < of.width) write_run<4>(&memory.sums[warp][head][column], sums[head]);
    }
}

// Blocks have a row and ROW_HEADS of the heads that have the same keys; their warps have a chunk each, of one part after the
// other.
template <class Format>
__device__ void attend_row(const Attending& of) {
    RowMemory& memory = shared_memory<RowMemory>();
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    const int unit = int(blockIdx.x % u32(of.units)), number = int(blockIdx.x / u32(of.units)), row = number % of.rows;
    const int group = of.heads / of.kv_heads, pieces = (group + ROW_HEADS - 1) / ROW_HEADS;
    const int kv_head = unit / pieces, before = unit % pieces * ROW_HEADS, first_head = kv_head * group + before;
    const int heads = group - before < ROW_HEADS ? group - before : ROW_HEADS;
    const Place place = of.places[row];
    const Seen seen(place.position, of.reach);
    int from = seen.start, to = seen.stop;
    if (of.partials) {
        const int begin = (from / PART + number / of.rows) * PART;
        if (begin >= to) return;
        if (from < begin) from = begin;
        if (to > begin + PART) to = begin + PART;
    }
    for (int i = thread; i < ROW_HEADS * of.width; i += ROW_THREADS) {
        const int head = i / of.width, column = i % of.width;
        memory.queries[head][column] =
            head < heads ? of.q[i64(row) * of.q_stride + (first_head + head) * of.width + column] : 0;
    }
    Softmax softmax[ROW_HEADS];
    for (int head = 0; of.sinks && head < heads; ++head) softmax[head].begin(of.sinks + first_head + head);

    for (int part = from / PART * PART; part < to; part += PART) {
        const int first = part + warp * CHUNK, at = first + lane;
        const bool there = first < to && first + CHUNK > from, counts = seen.has(at);
        const int near = at < from ? from : at < to ? at : to - 1;
        const int cached = int(place.cached(near, of.own, of.tokens, kv_head, of.kv_heads));
        float scores[ROW_HEADS] = {}, largest[ROW_HEADS];
        __syncthreads();  // queries are there, and the sums of the part before are read
        if (there) find_scores<Format>(memory, of, cached, scores);
#pragma unroll
        for (int head = 0; head < ROW_HEADS; ++head) {
            largest[head] = warp_max(there && counts ? scores[head] : LOWEST);
            if (lane == 0) memory.largest[warp][head] = largest[head];
        }
        __syncthreads();
#pragma unroll
        for (int head = 0; head < ROW_HEADS; ++head) {
            float so_far = LOWEST;
            for (int chunk = 0; chunk < warp; ++chunk) so_far = fmaxf(so_far, memory.largest[chunk][head]);
            const float higher = fmaxf(so_far, largest[head]);
            const float weight = there && counts ? expf(scores[head] - higher) : 0, total = warp_sum(weight);
            memory.weights[warp][lane][head] =
                Format::SCALED && there && counts ? weight * of.value_scales[cached] : weight;
            if (lane == 0) memory.shrink[warp][head] = expf(so_far - higher), memory.totals[warp][head] = total;
        }
        __syncwarp();
        if (there)
            add_values<Format>(memory, of, cached, from > first ? from - first : 0, to - first < CHUNK ? to - first : CHUNK);
        __syncthreads();

        const int begin = from > part ? (from - part) / CHUNK : 0;
        const int end = to - part < PART ? (to - part + CHUNK - 1) / CHUNK : ROW_WARPS;
        const bool begins = of.partials || part <= from, ends = part + PART >= to;
#pragma unroll
        for (int head = 0; head < ROW_HEADS; ++head) {
            if (head >= heads) break;
            Softmax own;
            for (int chunk = begin; chunk < end; ++chunk) {
                own.total = fmaf(own.total, memory.shrink[chunk][head], memory.totals[chunk][head]);
                own.largest = fmaxf(own.largest, memory.largest[chunk][head]);
            }
            float keep = 0, grow = 1, inverse = 1;
            float* out = of.y + i64(row) * of.y_stride + (first_head + head) * of.width;
            if (of.partials) {
                out = of.partial(row, first_head + head, part / PART - seen.first_part());
                if (thread == 0) out[of.width] = own.largest, out[of.width + 1] = own.total;
            } else {
                softmax[head].add(own.largest, own.total, keep, grow);
                if (ends) inverse = 1 / softmax[head].total;
            }
            for (int column = thread; column < of.width; column += ROW_THREADS) {
                float sum = 0;
                for (int chunk = begin; chunk < end; ++chunk)
                    sum = fmaf(sum, memory.shrink[chunk][head], memory.sums[chunk][head][column]);
                out[column] = fmaf(sum, grow, (begins ? 0 : out[column]) * keep) * inverse;
            }
        }
    }
}

// What attends, by the name of a kernel, the threads of a block, and the blocks of a multiprocessor that there are registers
// for.
#define ATTEND_BY(name, THREADS, BLOCKS, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        name(const float* q, int q_stride, const Place* places, const void* keys, const float* key_scales,             \
             const void* values, const float* value_scales, int own, int tokens, float* partials, const float* sinks,  \
             float* y, int y_stride, int rows, int heads, int kv_heads, int width, float scale, float cap,             \
             Reach reach, int room, int units, int tiles, int stride) {                                                \
        wait_for_previous();                                                                                           \
        __VA_ARGS__({q, q_stride, places, keys, values, key_scales, value_scales, own, tokens, partials, sinks, y,     \
                     y_stride, rows, heads, kv_heads, width, scale, cap, reach, room, units, tiles, stride});          \
    }

// Blocks of tiles.
#define ATTEND(name, Format, WIDTH, QUERIES) ATTEND_BY(name, ATTENDING, BLOCKS, attend<Format, WIDTH / SLICE, QUERIES>)

// Blocks of rows that each are of another sequence: heads of up to WIDEST, in whole copies of 16 bytes.
#define ATTEND_ROW(name, Format) ATTEND_BY(name, ROW_THREADS, 2, attend_row<Format>)


// y of all parts of rows that were computed apart; a thread per value.
__device__ inline void combine(const float* partials, const float* sinks, float* y, int y_stride, const Place* places, int rows,
                               int heads, int width, Reach reach, int room) {
    const int i = int(thread_number() % width);
    const i64 number = thread_number() / width, row = number / heads;
    if (row >= rows) return;
    const int parts = Seen(places[row].position, reach).parts();
    const float* from = partials + number * room * (width + 4);
    Softmax softmax;
    if (sinks) softmax.begin(sinks + number % heads);
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
        const float* each = from + part * (width + 4);
        float keep, grow;
        softmax.add(each[width], each[width + 1], keep, grow);
        sum = fmaf(each[i], grow, sum * keep);
    }
    y[row * y_stride + number % heads * width + i] = sum * (1 / softmax.total);
}

#define COMBINE(name)                                                                                                  \
    extern "C" __global__ void name(const float* partials, const float* sinks, float* y, int y_stride,                 \
                                    const Place* places, int rows, int heads, int width, Reach reach, int room) {      \
        wait_for_previous();                                                                                           \
        combine(partials, sinks, y, y_stride, places, rows, heads, width, reach, room);                                \
    }

// By the widest head, and what keys and values are kept as; a thread has sums of as many values, about.
#define ATTEND_IN(format, Format)                                                                                      \
    ATTEND(attend_64_##format, Format, 64, 32) ATTEND(attend_128_##format, Format, 128, 32)                            \
    ATTEND(attend_256_##format, Format, 256, 16) ATTEND(attend_576_##format, Format, WIDEST, 8)                        \
    ATTEND_ROW(attend_row_##format, Format) COMBINE(combine_##format)
