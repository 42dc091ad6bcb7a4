// What only the device has: conversions of half precision, addresses that kernels read from memory, reads that the first
// cache does not keep, copies to shared memory, tensor cores. Everything else in the kernels is plain C++, which the tests also compile for the host, with a header
// of their own in the place of this one. No header of CUDA's is needed.

__device__ inline float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned short float_to_half(float value) {  // to nearest, ties to even
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float* floats_at(unsigned long long address) { return reinterpret_cast<float*>(address); }

// sum + the products of four unsigned bytes by four signed ones.
__device__ inline int dot4(unsigned codes, unsigned values, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(codes), "r"(values));
    return sum;
}

// 16 bytes that are read once: they leave the first cache to what is read again and again.
__device__ inline uint4 read_once(const void* from) {
    uint4 value;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from));
    return value;
}

// Waits until the kernel before this one is done and its results are seen, then lets the one behind begin as far as it can. A
// kernel that is launched `early` calls it before it reads or writes what other kernels write or read. Not the other way
// around: kernels would wait in a long row, and have the registers of those that compute. Before Hopper a kernel only begins
// when the one before it is done.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" : : : "memory");
#endif
}

// The same value. The compiler does not know what it is made of, and so does not make it anew for each use.
__device__ inline unsigned computed_once(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}
template <class Type>
__device__ inline Type* computed_once(Type* value) {
    asm volatile("" : "+l"(value));
    __builtin_assume(__isGlobal(value));
    return value;
}

// The memory that the threads of a block share, as one value for each type of it.
template <class Block>
__device__ inline Block& shared_memory() {
    __shared__ Block block;
    return block;
}

// Begins to copy 4, 8 or 16 bytes of global memory to shared memory; both are aligned to as many. Where nothing is there to
// be copied, zeros are.
template <int BYTES>
__device__ inline void copy_async(void* to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = unsigned(__cvta_generic_to_shared(to)), size = there ? BYTES : 0;
    if (BYTES == 16) {  // past the first cache: it is read once
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(target), "l"(from), "r"(size) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :
                     : "r"(target), "l"(from), "n"(BYTES), "r"(size)
                     : "memory");
    }
#else
    for (int i = 0; i < BYTES / 4; ++i)
        static_cast<unsigned*>(to)[i] = there ? static_cast<const unsigned*>(from)[i] : 0;
#endif
}

// Makes a group of the copies that this thread has begun since the last one, which may be none.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until of this thread's groups only the last LEFT may be under way.
template <int LEFT>
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
#endif
}

// Reads four tiles of 8 rows by 16 bytes from shared memory, by all threads of a warp. Lane l knows where row l % 8 of tile
// l / 8 is, aligned to 16 bytes; lane 4 g + t gets of each tile bytes 4 t to 4 t + 3 of row g.
__device__ inline void read_tiles(unsigned (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}

#if __CUDA_ARCH__ < 800
// sums = A B + sums, of A[8, 16] by B[16, 8]: Turing's.
__device__ inline void multiply_small_tiles(int& first, int& second, unsigned a, unsigned b) {
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(first), "+r"(second)
                 : "r"(a), "r"(b));
}
#endif

// sums = A B + c by all threads of a warp, of signed bytes: A[16, k], B[k, 8] and C[16, 8], where k is WORDS * 16. Lane
// 4 g + t has of A: rows g and g + 8 at columns 4 t to 4 t + 3, then the same 16 columns on; of B: rows 4 t to 4 t + 3 of
// column g, then the same 16 rows on; of C: row g at columns 2 t and 2 t + 1, then row g + 8. (PTX ISA, "Matrix fragments for
// mma.m16n8k16" and "for mma.m16n8k32".)
template <int WORDS>
__device__ inline void multiply_tiles(int (&sums)[4], const unsigned (&a)[2 * WORDS], const unsigned (&b)[WORDS],
                                      const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    if constexpr (WORDS == 2) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%10, %11, %12, %13};"
                     : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]),
                       "r"(c[3]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                     "{%7, %8, %9, %10};"
                     : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    }
#else
    for (int i = 0; i < 4; ++i) sums[i] = c[i];
    for (int word = 0; word < WORDS; ++word)
        for (int half = 0; half < 2; ++half)
            multiply_small_tiles(sums[2 * half], sums[2 * half + 1], a[2 * word + half], b[word]);
#endif
}
