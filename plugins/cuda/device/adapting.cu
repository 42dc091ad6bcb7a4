// -- adapters: y += up @ (down @ x), each row with the matrices of its own slot -----------------------------------------
// A product has parts side by side, and a table AdaptedFactors[parts, slots] says what is in slots. The sum of a row depends on
// its own adapter alone; a zero changes no bit of y.

struct AdaptedFactors {
    u64 down, up;  // f32[rank, columns] and f32[rank, width]
    i64 rank;
};

struct AdaptedPart {
    i64 begin, width;
};

// between: f32[rows, parts, most]
extern "C" __global__ void adapt_down(const float* x, int x_stride, const Place* places, const AdaptedFactors* table,
                                      float* between, int rows, int parts, int slots, int columns, int most) {
    wait_for_previous();
    const i64 at = warp_number(), row = at / (parts * most);
    if (row >= rows) return;
    const int part = at / most % parts, r = at % most;
    const AdaptedFactors& own = table[part * i64(slots) + places[row].adapter];
    const float* down = floats_at(own.down) + r * i64(columns);
    float total = 0;
    const int end = r < own.rank ? columns : 0;
    for (int i = threadIdx.x % WARP; i < end; i += WARP) total += down[i] * x[row * x_stride + i];
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) between[at] = total;
}

extern "C" __global__ void adapt_up(const float* between, const Place* places, const AdaptedFactors* table, const AdaptedPart* of,
                                    float* y, int y_stride, int rows, int parts, int slots, int width, int most) {
    wait_for_previous();
    const i64 row = thread_number() / width, i = thread_number() % width;
    if (row >= rows) return;
    int part = 0;
    while (i >= of[part].begin + of[part].width) ++part;
    const AdaptedFactors& own = table[part * i64(slots) + places[row].adapter];
    const float* up = floats_at(own.up) + (i - of[part].begin);
    float total = 0;
    for (int r = 0; r < own.rank; ++r) total += up[r * of[part].width] * between[(row * parts + part) * most + r];
    if (total != 0) y[row * y_stride + i] += total;
}
