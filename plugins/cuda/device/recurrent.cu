// Layers with a recurrent state: what plugins/recurrent.py states. The arithmetic is that of plugins/native/kernels/recurrent.c.
//
// What such a layer is given is *lined up* first: the rows of the step, and behind them the guesses of earlier steps that have
// turned out to be right, which the state has not taken yet. A span takes its guesses, and then its own rows.

constexpr int MOST_GUESSES = 16;  // that a slot has room for

// A span, and the slot of its sequence.
struct Recurring {
    i64 slot, row, rows;  // its first row in the step, and how many they are
    i64 before, extra;    // how many guesses it takes first, and where the first of them is lined up
    i64 sure;             // how many of all that it takes change the state; later ones may be wrong
    i64 fresh;            // whether the sequence begins: there is no state
    __device__ i64 count() const { return before + rows; }
    __device__ i64 place(i64 number) const { return number < before ? extra + number : row + number - before; }
};

// Values side by side.
struct Sources {
    struct {
        u64 address;
        int stride, width;
    } all[5];
    __device__ float read(i64 row, int i) const {
        int source = 0;
        for (; i >= all[source].width; ++source) i -= all[source].width;
        return floats_at(all[source].address)[row * all[source].stride + i];
    }
};

// y: f32[lined, width]: what is convolved of a row, and its gates. `owners` says which span a row is of.
extern "C" __global__ void line_up(Sources sources, const float* guessed, const Recurring* spans, const int* owners, float* y,
                                   int rows, int lined, int width) {
    wait_for_previous();
    const i64 row = thread_number() / width;
    const int i = int(thread_number() % width);
    if (row >= lined) return;
    const Recurring& own = spans[owners[row]];
    const i64 guess = own.slot * MOST_GUESSES + row - own.extra;
    y[thread_number()] = row < rows ? sources.read(row, i) : guessed[guess * width + i];
}

// What is convolved of the row of some number of a span; below 0 those that the slot has kept, `kept` of them.
__device__ inline float seen_of(const Recurring& own, i64 number, const float* lined_up, int width, const float* recent,
                                int kept, int columns, int i) {
    if (number >= 0) return lined_up[own.place(number) * width + i];
    return own.fresh ? 0 : recent[(own.slot * kept + kept + number) * columns + i];
}

// y: f32[lined, columns], of which `filters`: f32[columns, taps] and the bias, which may be null, say what they are of: of
// each `apart`-th of the rows before. With `opens`, x becomes x * sigmoid(x) then.
extern "C" __global__ void convolve(const float* lined_up, int width, const float* recent, const float* filters,
                                    const float* bias, const Recurring* spans, const int* owners, float* y, int rows,
                                    int lined, int columns, int taps, int apart, int opens) {
    wait_for_previous();
    const i64 row = thread_number() / columns;
    const int i = int(thread_number() % columns);
    if (row >= lined) return;
    const Recurring& own = spans[owners[row]];
    const i64 number = row < rows ? row - own.row + own.before : row - own.extra;
    float sum = bias ? bias[i] : 0;
    const int kept = (taps - 1) * apart;
    for (int tap = 0; tap < taps; ++tap) {
        const float value = seen_of(own, number - kept + tap * apart, lined_up, width, recent, kept, columns, i);
        sum = fmaf(filters[i * taps + tap], value, sum);
    }
    y[thread_number()] = opens ? sum * sigmoid_of(sum) : sum;
}

// Heads of x, f32[lined, stride], become as long as 1, the first half of them 1 / sqrt(width). A warp per row and head.
extern "C" __global__ void unit_heads(float* x, int stride, int lined, int heads, int width) {
    wait_for_previous();
    const i64 row = warp_number() / heads;
    const int head = int(warp_number() % heads), lane = threadIdx.x % WARP;
    if (row >= lined) return;
    float* own = x + row * stride + head * width;
    float squares = 0;
    for (int i = lane; i < width; i += WARP) squares = fmaf(own[i], own[i], squares);
    const float length = 1 / sqrtf(warp_sum(squares) + 1e-6f);
    const float more = head < heads / 2 ? 1 / sqrtf(float(width)) : 1;
    for (int i = lane; i < width; i += WARP) own[i] = own[i] * length * more;
}

// A column of the state of a span's head, f32[slots, heads, keys, values]; from the row on that is not sure, a copy of it in
// `scratch`, which is as large.
struct Column {
    float *state, *copy;
    int keys, values;
    __device__ Column(const Recurring& own, float* states, float* scratch, int head, int heads, int keys, int values, int i)
        : keys(keys), values(values) {
        const i64 at = (own.slot * heads + head) * keys * values + i;
        state = states + at, copy = scratch + at;
        if (own.fresh)
            for (int key = 0; key < keys; ++key) state[i64(key) * values] = 0;
    }
    __device__ void guess() {
        for (int key = 0; key < keys; ++key) copy[i64(key) * values] = state[i64(key) * values];
        state = copy;
    }
};

// The head that a thread has a column of.
__device__ inline int head_of(int heads, int values) { return int(thread_number() / values % heads); }

// Has one row after the other of a span change a column of its head's state: `change` is given the span, the row's number in
// it, the column, head and number of the column. A thread per span, head and column.
template <class Change>
__device__ inline void scan(float* states, float* scratch, const Recurring* spans, int count, int heads, int keys, int values,
                            const Change& change) {
    const int i = int(thread_number() % values), head = head_of(heads, values);
    const i64 span = thread_number() / values / heads;
    if (span >= count) return;
    const Recurring own = spans[span];
    Column column(own, states, scratch, head, heads, keys, values, i);
    for (i64 number = 0; number < own.count(); ++number) {
        if (number == own.sure) column.guess();
        change(own, number, column.state, head, i);
    }
}

// By how much a state decays at a row; `floor` is the logarithm of what is left of it at least, or 0.
__device__ inline float decay_of(float rate, float speed, float floor) {
    return expf(floor != 0 ? floor * sigmoid_of(rate * speed) : -(rate * softplus_of(speed)));
}

// y: f32[lined, heads * keys]: by how much each row of a head's state decays, of gates that have these numbers behind one for
// each head.
extern "C" __global__ void decay(const float* gates, int gates_stride, const float* decay, const float* bias, float* y,
                                 int lined, int heads, int keys, float floor) {
    wait_for_previous();
    const int width = heads * keys, i = int(thread_number() % width);
    const i64 row = thread_number() / width;
    if (row >= lined) return;
    y[thread_number()] = decay_of(expf(decay[i / keys]), gates[row * gates_stride + heads + i] + bias[i], floor);
}

// How a gated DeltaNet's rows change states.
struct DeltaRule {
    const float* mixed;
    int columns;
    const float* gates;
    int gates_stride, heads, group, keys, values;
    float written;

    // Changes a column by a row, and reads it. `kept` says by how much each row of the state decays; with ALIKE all of them
    // do as the first.
    template <bool ALIKE>
    __device__ float change(i64 place, float* column, int head, int i, const float* kept) const {
        const float *from = mixed + place * columns, *gate = gates + place * gates_stride;
        const float *q = from + head / group * keys, *k = q + heads / group * keys;
        const float v = from[2 * heads / group * keys + head * values + i], all = kept[0];
        float found = 0;
#pragma unroll 8
        for (int key = 0; key < keys; ++key)
            found = fmaf(ALIKE ? k[key] : k[key] * kept[key], column[i64(key) * values], found);
        const float delta = (v - (ALIKE ? found * all : found)) * (sigmoid_of(gate[head]) * written);
        found = 0;
#pragma unroll 8
        for (int key = 0; key < keys; ++key) {
            float* state = column + i64(key) * values;
            const float now = fmaf(k[key], delta, *state * (ALIKE ? all : kept[key]));
            *state = now;
            found = fmaf(q[key], now, found);
        }
        return found;
    }
};

// A gated DeltaNet's rows change states and read them: y: f32[rows, heads * values].
extern "C" __global__ void scan_delta(const float* mixed, int columns, const float* gates, int gates_stride,
                                      const float* decay, const float* bias, float* states, float* scratch,
                                      const Recurring* spans, float* y, int count, int heads, int group, int keys,
                                      int values, float written, float floor) {
    wait_for_previous();
    const DeltaRule rule{mixed, columns, gates, gates_stride, heads, group, keys, values, written};
    const float rate = expf(decay[head_of(heads, values)]);
    const auto change = [&](const Recurring& own, i64 number, float* column, int head, int i) {
        const i64 place = own.place(number);
        const float kept = decay_of(rate, gates[place * gates_stride + heads + head] + bias[head], floor);
        const float found = rule.change<true>(place, column, head, i, &kept);
        if (number >= own.before) y[(place * heads + head) * values + i] = found;
    };
    scan(states, scratch, spans, count, heads, keys, values, change);
}

// The same where each row of a head's state decays by itself: `decays`: f32[lined, heads * keys].
extern "C" __global__ void scan_delta_by_rows(const float* mixed, int columns, const float* gates, int gates_stride,
                                              const float* decays, float* states, float* scratch, const Recurring* spans,
                                              float* y, int count, int heads, int group, int keys, int values,
                                              float written) {
    wait_for_previous();
    const DeltaRule rule{mixed, columns, gates, gates_stride, heads, group, keys, values, written};
    const auto change = [&](const Recurring& own, i64 number, float* column, int head, int i) {
        const i64 place = own.place(number);
        const float found = rule.change<false>(place, column, head, i, decays + (place * heads + head) * keys);
        if (number >= own.before) y[(place * heads + head) * values + i] = found;
    };
    scan(states, scratch, spans, count, heads, keys, values, change);
}

// y = x / sqrt(mean(x^2) + epsilon) * gain * z * sigmoid(z) of each head of x, f32[rows, heads * width], or sigmoid(z) if that
// is `squashed`; a warp per row and head.
extern "C" __global__ void norm_and_gate(const float* x, const float* gain, const float* z, int z_stride, float* y, int rows,
                                         int heads, int width, float epsilon, int squashed) {
    wait_for_previous();
    const i64 row = warp_number() / heads;
    const int head = int(warp_number() % heads), lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float *from = x + warp_number() * width, *gate = z + row * z_stride + head * width;
    float squares = 0;
    for (int i = lane; i < width; i += WARP) squares = fmaf(from[i], from[i], squares);
    const float scale = 1 / sqrtf(warp_sum(squares) / width + epsilon);
    for (int i = lane; i < width; i += WARP)
        y[warp_number() * width + i] = from[i] * scale * gain[i] * ((squashed ? 1 : gate[i]) * sigmoid_of(gate[i]));
}

// A state space's rows change states and read them: y: f32[rows, heads * values].
extern "C" __global__ void scan_space(const float* mixed, int columns, const float* gates, int gates_stride,
                                      const float* decay, const float* bias, const float* skip, float least, float most,
                                      float* states, float* scratch, const Recurring* spans, const float* z, int z_stride,
                                      float* y, int count, int heads, int group, int keys, int values) {
    wait_for_previous();
    const float rate = expf(decay[head_of(heads, values)]);
    const auto change = [&](const Recurring& own, i64 number, float* column, int head, int i) {
        const i64 row = own.place(number);
        const float *from = mixed + row * columns, x = from[head * values + i];
        const float *b = from + heads * values + head / group * keys, *c = b + heads / group * keys;
        const float step = fminf(fmaxf(softplus_of(gates[row * gates_stride + head] + bias[head]), least), most);
        const float kept = expf(-(rate * step)), written = x * step;
        float found = 0;
#pragma unroll 8
        for (int key = 0; key < keys; ++key) {
            float* state = column + i64(key) * values;
            const float now = fmaf(b[key], written, *state * kept);
            *state = now;
            found = fmaf(c[key], now, found);
        }
        if (number < own.before) return;
        const float gate = z[row * z_stride + head * values + i];
        y[(row * heads + head) * values + i] = fmaf(skip[head], x, found) * (gate * sigmoid_of(gate));
    };
    scan(states, scratch, spans, count, heads, keys, values, change);
}

// Has slots keep the rows that the convolution of what follows sees, f32[slots, reach - 1, columns], and the guesses, f32[slots,
// MOST_GUESSES, width]. A thread per span and element; it reads each row before it writes in its place.
extern "C" __global__ void keep_rows(const float* lined_up, float* recent, float* guessed, const Recurring* spans, int count,
                                     int columns, int width, int reach) {
    wait_for_previous();
    const i64 span = thread_number() / width;
    const int i = int(thread_number() % width), kept = reach - 1;
    if (span >= count) return;
    const Recurring own = spans[span];
    if (i < columns)
        for (int at = 0; at < kept; ++at)
            recent[(own.slot * kept + at) * columns + i] =
                seen_of(own, own.sure - kept + at, lined_up, width, recent, kept, columns, i);
    for (i64 number = own.sure; number < own.count() && number - own.sure < MOST_GUESSES; ++number)
        guessed[(own.slot * MOST_GUESSES + number - own.sure) * width + i] = lined_up[own.place(number) * width + i];
}
