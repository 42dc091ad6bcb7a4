// What a kernel reads rows from: values as they are, or what is made of them on the way, so that a norm or an open gate takes
// no kernel of its own. A block of threads has one row, or a part of it.

// How elements of x become those that are read.
constexpr int AS_THEY_ARE = 0, SWISH_TIMES = 1, RELU_TIMES = 2, GELU_TIMES = 3, NORM = 4;

__device__ inline float sigmoid_of(float x) {
    const float decay = expf(-fabsf(x));  // of a non-positive number: no overflow
    return (x >= 0 ? 1 : decay) / (1 + decay);
}

// What opens a gate, by SWISH_TIMES, RELU_TIMES or GELU_TIMES: that by the approximation with tanh, as plugins/native/rows.c
// states it.
__device__ inline float opened(float g, int by) {
    if (by == RELU_TIMES) return fmaxf(g, 0);
    return g * sigmoid_of(by == SWISH_TIMES ? g : (g + g * g * g * 0x1.6e4e26p-5f) * 0x1.988454p0f);
}

// f32[rows, width], the result of
// - a gate: opened(x) * other,
// - a norm: s / sqrt(mean(s^2) + epsilon) * gain of s = x + other, or of x where `other` is null; `sum` gets s.
// `result`, where it is not null, gets what is read: whoever reads an element writes it there.
struct RowSource {
    const float *x, *other, *gain;
    float *sum, *result;
    int x_stride, other_stride, sum_stride, result_stride, width, made;
    int in_fours;  // whether width, strides and addresses let all be read and written four elements at a time
    float epsilon;

    // By what elements of a row are divided. All threads of the block call it, each block for one row.
    __device__ float divisor(i64 row) const {
        if (made != NORM) return 1;
        const float *a = x + row * x_stride, *b = other + row * other_stride;
        float squares = 0;
        if (in_fours) {
#pragma unroll 8  // as many reads under way
            for (int i = 4 * int(threadIdx.x); i < width; i += 4 * int(blockDim.x)) {
                float values[4], more[4] = {};
                read_run<4>(a + i, values);
                if (other) read_run<4>(b + i, more);
                for (int j = 0; j < 4; ++j) {
                    const float s = other ? values[j] + more[j] : values[j];
                    squares = fmaf(s, s, squares);
                }
            }
        } else {
            for (int i = int(threadIdx.x); i < width; i += int(blockDim.x)) {
                const float s = other ? a[i] + b[i] : a[i];
                squares = fmaf(s, s, squares);
            }
        }
        squares = block_sum(squares);
        return sqrtf(squares / width + epsilon);
    }

    // COUNT neighbouring elements of a row, from a multiple of COUNT on; more than one only where all is in fours.
    template <int COUNT>
    __device__ void read(i64 row, int at, float divisor, float* values) const {
        float more[COUNT];
        read_run<COUNT>(x + row * x_stride + at, values);
        if (other) read_run<COUNT>(other + row * other_stride + at, more);
        if (made == NORM) {
            float gains[COUNT];
            read_run<COUNT>(gain + at, gains);
            if (other)
                for (int i = 0; i < COUNT; ++i) values[i] += more[i];
            if (sum) write_run<COUNT>(sum + row * sum_stride + at, values);
            for (int i = 0; i < COUNT; ++i) values[i] = values[i] / divisor * gains[i];
        } else if (made != AS_THEY_ARE) {
            for (int i = 0; i < COUNT; ++i) values[i] = opened(values[i], made) * more[i];
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
    const float divisor = source.divisor(row);
    const int first = int(blockIdx.x % parts) * NORM_PART;
    if (source.in_fours) {
        float values[4];
        if (const int at = first + 4 * int(threadIdx.x); at < source.width) source.read<4>(row, at, divisor, values);
    } else {
        for (int at = first + int(threadIdx.x); at < first + NORM_PART && at < source.width; at += int(blockDim.x)) {
            float value;
            source.read<1>(row, at, divisor, &value);
        }
    }
}
