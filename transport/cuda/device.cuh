// What only the device has: conversions of half precision, addresses that kernels read from memory, reads that the first
// cache does not keep. Everything else in the kernels is plain C++, which the tests also compile for the host, with a header
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

// Has a line of memory on its way to the second cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }
