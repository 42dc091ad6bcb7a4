// One multiplication of tiles, C[16, 8] += A[16, k] B[k, 8], with elements where the PTX ISA says that threads have them
// ("Matrix fragments for mma.m16n8k16" and "for mma.m16n8k32", of integers), in its own words.

template <int WORDS>
__device__ void multiply(const signed char* a, const signed char* b, int* c) {
    const int laneid = threadIdx.x % 32, group_id = laneid >> 2, thread_in_group = laneid % 4, k = 16 * WORDS;
    unsigned of_a[2 * WORDS] = {}, of_b[WORDS] = {};
    for (int i = 0; i < 8 * WORDS; ++i) {
        const int row = i < 4 || (8 <= i && i < 12) ? group_id : group_id + 8;
        const int column = thread_in_group * 4 + (i & 0x3) + (i < 8 ? 0 : 16);
        of_a[i / 4] |= unsigned(a[row * k + column] & 0xFF) << i % 4 * 8;
    }
    for (int i = 0; i < 4 * WORDS; ++i) {
        const int row = thread_in_group * 4 + (i & 0x3) + (i < 4 ? 0 : 16);
        of_b[i / 4] |= unsigned(b[row * 8 + group_id] & 0xFF) << i % 4 * 8;
    }
    int of_c[4], sums[4];
    const auto at = [&](int i) { return (i < 2 ? group_id : group_id + 8) * 8 + thread_in_group * 2 + (i & 0x1); };
    for (int i = 0; i < 4; ++i) of_c[i] = c[at(i)];
    multiply_tiles<WORDS>(sums, of_a, of_b, of_c);
    for (int i = 0; i < 4; ++i) c[at(i)] = sums[i];
}

extern "C" __global__ void multiply_16(const signed char* a, const signed char* b, int* c) { multiply<1>(a, b, c); }
extern "C" __global__ void multiply_32(const signed char* a, const signed char* b, int* c) { multiply<2>(a, b, c); }
