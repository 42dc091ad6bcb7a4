// The small nodes of a rank's graph: norms, what is done to each element, heads, and routers.

// y = x / sqrt(mean(x^2) + epsilon) * scale for each of several groups of `width` in each row (whole rows are a RowSource), or,
// where they are `centred`, of x - mean(x). A warp writes a part of a group: all of its warps add up the squares of all of it, as
// that takes less time than to tell each other.
extern "C" __global__ void norm_groups(const float* x, int x_stride, const float* scale, float* y, int y_stride, int rows,
                                       int groups, int width, int in_fours, int centred, float epsilon) {
    wait_for_previous();
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
    float mean = 0, squares = 0;
    if (centred) {
        for (int i = lane; i < width; i += WARP) mean += from[i];
        mean = warp_sum(mean) / width;
        for (int i = lane; i < width; i += WARP) squares = fmaf(from[i] - mean, from[i] - mean, squares);
    } else if (in_fours) {
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
        if (first + i * WARP < width) to[first + i * WARP] = (own[i] - mean) / root * scales[i];
}

// y = a + b, which has an element for each row, or for each of a
extern "C" __global__ void add(const float* a, int a_stride, const float* b, int b_stride, float* y, int y_stride,
                               int rows, int width, int b_width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = a[row * a_stride + i] + b[row * b_stride + (b_width == 1 ? 0 : i)];
}

// y = x * factor + addend
extern "C" __global__ void scale(const float* x, int x_stride, float factor, float addend, float* y, int y_stride, int rows,
                                 int width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] * factor + addend;
}

__device__ inline float softplus_of(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

// y = what becomes of each element v
#define EACH(name, result)                                                                                             \
    extern "C" __global__ void name(const float* x, int x_stride, float* y, int y_stride, int rows, int width) {       \
        wait_for_previous();                                                                                           \
        const i64 row = thread_number() / width, i = thread_number() % width;                                          \
        if (row >= rows) return;                                                                                       \
        const float v = x[row * x_stride + i];                                                                         \
        y[row * y_stride + i] = (result);                                                                              \
    }

EACH(sigmoid, sigmoid_of(v))
EACH(bounded, tanhf(v))
EACH(root, sqrtf(v))
EACH(softplus, softplus_of(v))

// y = x / 2 + softplus(a) * x^2 where x is positive, and x / 2 + (1 / 2 + softplus(b)) * (exp(x) - 1 - x) elsewhere
extern "C" __global__ void xielu(const float* x, int x_stride, const float* a, const float* b, float* y, int y_stride, int rows,
                                 int width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float v = x[row * x_stride + i];
    const float curved = v > 0 ? softplus_of(*a) * v * v : (0.5f + softplus_of(*b)) * (expm1f(v) - v);
    y[row * y_stride + i] = 0.5f * v + curved;
}

extern "C" __global__ void clip(const float* x, int x_stride, float low, float high, float* y, int y_stride, int rows,
                                int width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = fmaxf(fminf(x[row * x_stride + i], high), low);
}

// The elements from `first` on of each head of x become those from `y_first` on of each of y's, `width` of them. Heads are
// x_size elements apart, and y_size.
extern "C" __global__ void copy_heads(const float* x, int x_stride, int x_size, int first, float* y, int y_stride, int y_size,
                                      int y_first, int rows, int heads, int width) {
    wait_for_previous();
    const i64 number = thread_number() / width, row = number / heads;
    const int head = int(number % heads), i = int(thread_number() % width);
    if (row < rows) y[row * y_stride + i64(head) * y_size + y_first + i] = x[row * x_stride + i64(head) * x_size + first + i];
}

// -- routers: which experts a row chooses, and how much of each it gets -------------------------------------------------

// A warp per row.
extern "C" __global__ void softmax(const float* x, int x_stride, float* y, int y_stride, int rows, int width) {
    wait_for_previous();
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
    wait_for_previous();
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

// The two largest of each row and where they are, both [rows, 2]: each weighed by its softmax among the elements that are near
// it, of which the first counts no more for the second (`motley.SparseMixer`). A thread per row.
extern "C" __global__ void sparse_mixer(const float* x, int x_stride, float* weights, int* where, int rows, int width,
                                        float tolerance) {
    wait_for_previous();
    const i64 row = thread_number();
    if (row >= rows) return;
    const float* from = x + row * x_stride;
    for (int n = 0, taken = -1; n < 2; ++n) {
        int at = taken == 0 ? 1 : 0;
        for (int i = 0; i < width; ++i)
            if (i != taken && from[i] > from[at]) at = i;
        const float best = from[at];
        float total = 0;
        for (int i = 0; i < width; ++i)
            if (i != taken && !((best - from[i]) / fmaxf(fabsf(from[i]), best) > tolerance)) total += expf(from[i] - best);
        weights[2 * row + n] = 1 / total, where[2 * row + n] = taken = at;
    }
}

// -- residual streams, see plugins/streams.py --------------------------------------------------------------------------

#define MOST_STREAMS 8

// Of logits of S, 2 S or 2 S + S S columns, how streams are read, written to and mixed. A thread per row.
extern "C" __global__ void stream_gates(const float* x, int x_stride, const float* scale, const float* base, float* y, int y_stride,
                                        int rows, int width, int streams, int rounds, float epsilon, float written, float least) {
    wait_for_previous();
    const i64 row = thread_number();
    if (row >= rows) return;
    const float* from = x + row * x_stride;
    float *to = y + row * y_stride, mix[MOST_STREAMS][MOST_STREAMS];
    for (int i = 0; i < width; ++i) {
        const int part = i / streams;
        const float raw = from[i] * scale[part < 2 ? part : 2] + base[i];
        if (part == 0) to[i] = sigmoid_of(raw) + epsilon;
        else if (part == 1) to[i] = sigmoid_of(raw) * written + least;
        else mix[part - 2][i % streams] = raw;
    }
    if (!rounds) return;
    for (int n = 0; n < streams; ++n) {
        float largest = LOWEST, sum = 0;
        for (int i = 0; i < streams; ++i) largest = fmaxf(largest, mix[n][i]);
        for (int i = 0; i < streams; ++i) sum += mix[n][i] = expf(mix[n][i] - largest);
        for (int i = 0; i < streams; ++i) mix[n][i] = mix[n][i] / sum + epsilon;
    }
    for (int step = 1; step < 2 * rounds; ++step)  // columns, rows, columns ...
        for (int n = 0; n < streams; ++n) {
            float sum = epsilon;
            for (int i = 0; i < streams; ++i) sum += step % 2 ? mix[i][n] : mix[n][i];
            for (int i = 0; i < streams; ++i) (step % 2 ? mix[i][n] : mix[n][i]) /= sum;
        }
    for (int i = 2 * streams; i < width; ++i) to[i] = mix[i / streams - 2][i % streams];
}

// y[rows, width]: the sum of streams times their gates
extern "C" __global__ void read_streams(const float* x, int x_stride, const float* gates, int gates_stride, float* y, int y_stride,
                                        int rows, int width, int streams) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    float sum = 0;
    for (int n = 0; n < streams; ++n) sum += x[row * x_stride + n * width + i] * gates[row * gates_stride + n];
    y[row * y_stride + i] = sum;
}

// y: streams x, mixed if there are so many gates, each with what it gets of own[rows, width]
extern "C" __global__ void write_streams(const float* x, int x_stride, const float* gates, int gates_stride, const float* own,
                                         int own_stride, float* y, int y_stride, int rows, int width, int streams, int mixes) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float *from = x + row * x_stride + i, *written = gates + row * gates_stride + streams, *mix = written + streams;
    const float made = own[row * own_stride + i];
    float there[MOST_STREAMS];
    for (int n = 0; n < streams; ++n) there[n] = from[n * width];
    for (int n = 0; n < streams; ++n) {
        float sum = mixes ? 0 : there[n];
        for (int other = 0; mixes && other < streams; ++other) sum += there[other] * mix[other * streams + n];
        y[row * y_stride + n * width + i] = sum + made * written[n];
    }
}

// y: streams, each of which is own[rows, width] times how far its query in x fits its key. A warp per row and stream.
extern "C" __global__ void match_streams(const float* x, int x_stride, const float* keys, int keys_stride, const float* own,
                                         int own_stride, float* y, int y_stride, int rows, int width, int streams, float scale) {
    wait_for_previous();
    const i64 row = warp_number() / streams;
    const int first = int(warp_number() % streams) * width, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float *query = x + row * x_stride + first, *key = keys + row * keys_stride + first;
    float sum = 0;
    for (int i = lane; i < width; i += WARP) sum = fmaf(query[i], key[i], sum);
    const float fit = warp_sum(sum) * scale, root = sqrtf(fmaxf(fabsf(fit), 1e-6f));
    const float share = sigmoid_of(fit > 0 ? root : fit < 0 ? -root : 0);
    for (int i = lane; i < width; i += WARP) y[row * y_stride + first + i] = own[row * own_stride + i] * share;
}

// -- elements at places, sums, groups of experts ---------------------------------------------------------------------------

// y[rows, count]: the elements of x's rows at some places
extern "C" __global__ void gather(const float* x, int x_stride, const int* where, float* y, int rows, int count) {
    wait_for_previous();
    const i64 at = thread_number();
    if (at < i64(rows) * count) y[at] = x[at / count * x_stride + where[at]];
}

extern "C" __global__ void sum_row(const float* x, int x_stride, float* y, int rows, int width) {
    wait_for_previous();
    if (thread_number() >= rows) return;
    float total = 0;
    for (int i = 0; i < width; ++i) total += x[thread_number() * x_stride + i];
    y[thread_number()] = total;
}

// y = x / by, which has an element for each row, or for each of x
extern "C" __global__ void divide(const float* x, int x_stride, const float* by, int by_stride, float* y, int y_stride,
                                  int rows, int width, int by_width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] / by[row * by_stride + (by_width == 1 ? 0 : i)];
}

// y = x where a group of its elements is among the `kept` best of its row, and elsewhere the lowest number that counts. A
// group is worth the sum of its two largest. A thread per group.
extern "C" __global__ void keep_best_groups(const float* x, int x_stride, float* y, int y_stride, int rows, int groups,
                                            int width, int kept) {
    wait_for_previous();
    const i64 row = thread_number() / groups;
    const int own = int(thread_number() % groups);
    if (row >= rows) return;
    const auto worth = [&](int group) {
        const float* from = x + row * x_stride + group * width;
        float best = from[0] > from[1] ? from[0] : from[1], second = from[0] > from[1] ? from[1] : from[0];
        for (int i = 2; i < width; ++i) {
            if (from[i] > best) second = best, best = from[i];
            else if (from[i] > second) second = from[i];
        }
        return best + second;
    };
    const float mine = worth(own);
    int better = 0;
    for (int group = 0; group < groups; ++group) better += worth(group) > mine;
    for (int i = own * width; i < (own + 1) * width; ++i)
        y[row * y_stride + i] = better < kept ? x[row * x_stride + i] : -3e38f;
}

// y = base + the sum of the results of a row's experts, f32[rows, count, width], by their weights, in the order of the
// experts' numbers: so it has the same bits as on a CPU. No two of a row's are the same. `base` may be null.
extern "C" __global__ void mix(const float* results, const float* weights, const int* chosen, const float* base,
                               int base_stride, float* y, int y_stride, int rows, int count, int width) {
    wait_for_previous();
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
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    const float g = fminf(gate[row * gate_stride + i], limit);
    const float u = fmaxf(fminf(up[row * up_stride + i], limit), -limit) + addend;
    y[row * y_stride + i] = g * sigmoid_of(alpha * g) * u;
}

// y = x * by, which has an element for each row, or for each of x
extern "C" __global__ void multiply(const float* x, int x_stride, const float* by, int by_stride, float* y, int y_stride,
                                    int rows, int width, int by_width) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row < rows) y[row * y_stride + i] = x[row * x_stride + i] * by[row * by_stride + (by_width == 1 ? 0 : i)];
}

extern "C" __global__ void fill(float* y, float value, i64 count) {
    wait_for_previous();
    if (thread_number() < count) y[thread_number()] = value;
}
