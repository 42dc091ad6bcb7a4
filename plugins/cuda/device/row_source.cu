// What a kernel reads rows from: values as they are, or what is made of them on the way, so that a norm or an open gate takes
// no kernel of its own. A block of threads has one row, or a part of it.

// How elements of x become those that are read.
constexpr int AS_THEY_ARE = 0, SWISH_TIMES = 1, RELU_TIMES = 2, GELU_TIMES = 3, NORM = 4, LAYER_NORM = 5;

__device__ inline float sigmoid_of(float x) {
    const float decay = expf(-fabsf(x));  // of a non-positive number: no overflow
    return (x >= 0 ? 1 : decay) / (1 + decay);
}

// What opens a gate, by SWISH_TIMES, RELU_TIMES or GELU_TIMES: that by the approximation with tanh, as plugins/native/kernels/rows.c
// states it.
__device__ inline float opened(float g, int by) {
    if (by == RELU_TIMES) return fmaxf(g, 0);
    return g * sigmoid_of(by == SWISH_TIMES ? g : (g + g * g * g * 0x1.6e4e26p-5f) * 0x1.988454p0f);
}

// What elements of a row are normalised by.
struct Norming {
    float mean, divisor;
};

// f32[rows, width], the result of
// - a gate: opened(x) * other, or opened(x) where `other` is null,
// - a norm: s / sqrt(mean(s^2) + epsilon) * gain of s = x + other, or of x where `other` is null; `sum` gets s,
// - a layer norm: the same of s - mean(s).
// `bias`, where it is not null, is added to a norm.
// `result`, where it is not null, gets what is read: whoever reads an element writes it there.
struct RowSource {
    const float *x, *other, *gain, *bias;
    float *sum, *result;
    int x_stride, other_stride, sum_stride, result_stride, width, made;
    int in_fours;  // whether width, strides and addresses let all be read and written four elements at a time
    float epsilon;

    __device__ bool normalises() const { return made >= NORM; }

    // By what elements of a row are normalised. All threads of the block call it, each block for one row.
    __device__ Norming norming(i64 row) const {
        if (!normalises()) return {0, 1};
        float mean = 0;
        if (made == LAYER_NORM) {
            mean = block_sum(added(row, [](float s, float total) { return total + s; })) / width;
            __syncthreads();
        }
        const auto square = [mean](float s, float total) { return fmaf(s - mean, s - mean, total); };
        return {mean, sqrtf(block_sum(added(row, square)) / width + epsilon)};
    }

    // What a thread makes of its elements s of a row, one after another: total = add(s, total), from 0 on.
    template <typename Add>
    __device__ float added(i64 row, Add add) const {
        const float *a = x + row * x_stride, *b = other + row * other_stride;
        float total = 0;
        if (in_fours) {
#pragma unroll 8  // as many reads under way
            for (int i = 4 * int(threadIdx.x); i < width; i += 4 * int(blockDim.x)) {
                float values[4], more[4] = {};
                read_run<4>(a + i, values);
                if (other) read_run<4>(b + i, more);
                for (int j = 0; j < 4; ++j) total = add(other ? values[j] + more[j] : values[j], total);
            }
        } else {
            for (int i = int(threadIdx.x); i < width; i += int(blockDim.x)) total = add(other ? a[i] + b[i] : a[i], total);
        }
        return total;
    }

    // COUNT neighbouring elements of a row, from a multiple of COUNT on; more than one only where all is in fours.
    template <int COUNT>
    __device__ void read(i64 row, int at, Norming by, float* values) const {
        float more[COUNT];
        read_run<COUNT>(x + row * x_stride + at, values);
        if (other) read_run<COUNT>(other + row * other_stride + at, more);
        if (normalises()) {
            float gains[COUNT], biases[COUNT] = {};
            read_run<COUNT>(gain + at, gains);
            if (bias) read_run<COUNT>(bias + at, biases);
            if (other)
                for (int i = 0; i < COUNT; ++i) values[i] += more[i];
            if (sum) write_run<COUNT>(sum + row * sum_stride + at, values);
            for (int i = 0; i < COUNT; ++i) {
                values[i] = (values[i] - by.mean) / by.divisor * gains[i];
                if (bias) values[i] += biases[i];
            }
        } else if (made != AS_THEY_ARE) {
            for (int i = 0; i < COUNT; ++i) values[i] = opened(values[i], made) * (other ? more[i] : 1);
        }
        if (result) write_run<COUNT>(result + row * result_stride + at, values);
    }
};

// All that is read goes to `source.result` and `source.sum`: a block has NORM_PART elements of a row.
constexpr int NORM_PART = 512;
extern "C" __global__ void make_rows(RowSource source) {
    wait_for_previous();
    const int parts = (source.width + NORM_PART - 1) / NORM_PART;
    const i64 row = blockIdx.x / parts;
    const Norming by = source.norming(row);
    const int first = int(blockIdx.x % parts) * NORM_PART;
    if (source.in_fours) {
        float values[4];
        if (const int at = first + 4 * int(threadIdx.x); at < source.width) source.read<4>(row, at, by, values);
    } else {
        for (int at = first + int(threadIdx.x); at < first + NORM_PART && at < source.width; at += int(blockDim.x)) {
            float value;
            source.read<1>(row, at, by, &value);
        }
    }
}
