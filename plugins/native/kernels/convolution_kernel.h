/* Short and dilated convolutions of recurrent.c, of one level. */

/* All rows of a span, for the columns of one job. */
static void recur_convolution(const struct recurring *now, int64_t job) {
    const struct recurrent *d = now->d;
    const int64_t columns = d->columns, begin = job * COLUMNS_OF_JOB, rest = columns - begin;
    const int64_t end = begin + (rest < COLUMNS_OF_JOB ? rest : COLUMNS_OF_JOB);
    for (int64_t row = now->before; row < now->before + now->span->rows; row++) {
        const float *gates = recurrent_first(now, row) + columns;
        float *y = d->y + (now->span->row + row - now->before) * d->width;
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t left = end - i;
            floats sum = {0};
            if (d->filter_bias) sum = load_floats(d->filter_bias + i, left);
            for (int64_t tap = 0; tap < d->reach; tap++) {
                const int64_t seen = row - d->reach + 1 + tap;
                const float *from = recurrent_columns(now, seen, i);
                floats product = load_floats(from, left);
                if (seen >= now->before) product = product * load_floats(from + 2 * columns, left);
                sum = fused(load_floats(d->filters + tap * columns + i, left), product, sum);
            }
            store_floats(y + i, sum * load_floats(gates + i, left), left);
        }
    }
}

/* The same of a dilated one. */
static void recur_dilated(const struct recurring *now, int64_t job) {
    const struct recurrent *d = now->d;
    const int64_t columns = d->columns, begin = job * COLUMNS_OF_JOB, rest = columns - begin;
    const int64_t end = begin + (rest < COLUMNS_OF_JOB ? rest : COLUMNS_OF_JOB);
    for (int64_t row = now->before; row < now->before + now->span->rows; row++) {
        float *y = d->y + (now->span->row + row - now->before) * d->width;
        for (int64_t i = begin; i < end; i += LANES) {
            const float *filter = d->filters + i;
            floats sum = {0};
            for (int64_t seen = row - d->reach + 1; seen <= row; seen += d->dilation, filter += columns)
                sum = fused(load_floats(filter, end - i), load_floats(recurrent_columns(now, seen, i), end - i), sum);
            store_floats(y + i, open_gate(sum, sum), end - i);
        }
    }
}
