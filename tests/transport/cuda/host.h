// What the kernels need of CUDA, on the host, in the place of device.cuh. The threads of a warp are coroutines of one
// thread; a shuffle lets the others of the warp come to the same place. They change places often: by GCC's own jumps, and
// by variables that are found without a call (-ftls-model).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>

#define __device__
#define __global__

// Aligned as on the device, so that a read of what is not ends the test.
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static thread_local struct { unsigned x; } blockIdx, threadIdx, blockDim;

template <class To, class From> static To bits_of(From value) {
    To to;
    static_assert(sizeof to == sizeof value, "");
    std::memcpy(&to, &value, sizeof to);
    return to;
}

static float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
static unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float half_to_float(unsigned short bits) { return float(bits_of<_Float16>(bits)); }
static int dot4(unsigned codes, unsigned values, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(codes >> i & 0xFF) * static_cast<signed char>(values >> i & 0xFF);
    return sum;
}
static uint4 read_once(const void* from) { return *static_cast<const uint4*>(from); }
static void prefetch(const void*) {}
static unsigned short float_to_half(float value) { return bits_of<unsigned short>(_Float16(value)); }
// Addresses of the device that are in memory are told from the host's as in host_driver.py.
static float* floats_at(unsigned long long address) { return reinterpret_cast<float*>(address - (1ull << 60)); }

constexpr int OF_A_WARP = 32, LAUNCHING = OF_A_WARP;
constexpr int STACK = (1 << 15) + 320;  // no power of two: stacks would be in the way of each other in caches

// Those of one thread of the host. They stay from launch to launch, as it takes calls of the system to begin one.
struct Coroutines {
    float shuffled[2][OF_A_WARP];
    int shuffles[OF_A_WARP];
    int next[OF_A_WARP], before;  // a ring of those that have not ended, and who of them had its turn before
    void* places[OF_A_WARP + 1][5];
    bool begun[OF_A_WARP + 1] = {};
    unsigned first;  // thread of the warp
    ucontext_t context;
    void (*body)(void**);
    void** given;
    std::unique_ptr<char[]> stacks{new char[STACK * OF_A_WARP]};
};
static thread_local Coroutines* own;

static void coroutine();

static void begin(int lane) {
    own->begun[lane] = true;
    getcontext(&own->context);
    own->context.uc_stack.ss_sp = &own->stacks[STACK * lane], own->context.uc_stack.ss_size = STACK;
    makecontext(&own->context, coroutine, 0);
    setcontext(&own->context);
}

// Returns when it is the turn of `lane` again.
__attribute__((noinline)) static void give_way(int lane, int next) {
    if (__builtin_setjmp(own->places[lane])) return;
    threadIdx.x = own->first + next;
    if (next == LAUNCHING || own->begun[next]) __builtin_longjmp(own->places[next], 1);
    begin(next);
}

static float __shfl_sync(unsigned, float value, int from) {
    const int lane = threadIdx.x % OF_A_WARP, turn = own->shuffles[lane]++ % 2;
    own->shuffled[turn][lane] = value;
    own->before = lane;
    give_way(lane, own->next[lane]);
    return own->shuffled[turn][from];
}

static float __shfl_xor_sync(unsigned mask, float value, int distance) {
    return __shfl_sync(mask, value, (threadIdx.x % OF_A_WARP) ^ distance);
}

static bool is_without_shuffles() { return blockIdx.x == 0 && own->first == 0 && own->shuffles[0] == 0; }

static void coroutine() {
    for (;;) {
        own->body(own->given);
        const int lane = threadIdx.x % OF_A_WARP, next = own->next[lane];
        own->next[own->before] = next;
        give_way(lane, next == lane || (lane == 0 && is_without_shuffles()) ? LAUNCHING : next);
    }
}

static void launch(void (*kernel)(void**), int blocks, int threads, void** arguments) {
    static thread_local const std::unique_ptr<Coroutines> kept(new Coroutines);
    own = kept.get(), own->body = kernel, own->given = arguments, blockDim.x = threads;
    for (int block = 0; block < blocks; ++block)
        for (int first = 0; first < threads; first += OF_A_WARP) {
            const int last = std::min(OF_A_WARP, threads - first) - 1;
            blockIdx.x = block, own->first = first, own->before = last;
            for (int lane = 0; lane <= last; ++lane) own->shuffles[lane] = 0, own->next[lane] = lane + 1;
            own->next[last] = 0;
            give_way(LAUNCHING, 0);
            if (is_without_shuffles()) {  // all other threads are plain calls
                for (; block < blocks; ++block)
                    for (int thread = block == 0; thread < threads; ++thread) {
                        blockIdx.x = block, threadIdx.x = thread;
                        kernel(arguments);
                    }
                return;
            }
        }
}

template <class... Types, std::size_t... I>
static void call(void (*kernel)(Types...), void** arguments, std::index_sequence<I...>) {
    kernel(*reinterpret_cast<Types*>(arguments[I])...);
}

template <class... Types>
static void call(void (*kernel)(Types...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Types...>());
}

#define KERNEL(name)                                                                                                   \
    extern "C" void launch_##name(int blocks, int threads, void** arguments) {                                         \
        launch([](void** given) { call(name, given); }, blocks, threads, arguments);                                   \
    }
