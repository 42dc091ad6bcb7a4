// What the kernels need of CUDA, on the host, in the place of device.cuh. The threads of a block are coroutines of one
// thread; a shuffle lets the others of the block come to the same place.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
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
static unsigned short float_to_half(float value) { return bits_of<unsigned short>(_Float16(value)); }
// Addresses of the device that are in memory are told from the host's as in host_driver.py.
static float* floats_at(unsigned long long address) { return reinterpret_cast<float*>(address - (1ull << 60)); }

constexpr int MOST_THREADS = 1024, STACK = 1 << 15;
static thread_local float shuffled[2][MOST_THREADS];
static thread_local int shuffles[MOST_THREADS];
static thread_local jmp_buf scheduler, places[MOST_THREADS];
static thread_local bool started[MOST_THREADS], ended;
static thread_local ucontext_t context;
static thread_local void (*body)(void**);
static thread_local void** given;

static float __shfl_xor_sync(unsigned, float value, int distance) {
    const int thread = threadIdx.x, turn = shuffles[thread]++ % 2;
    shuffled[turn][thread] = value;
    if (!_setjmp(places[thread])) _longjmp(scheduler, 1);
    return shuffled[turn][thread ^ distance];
}

static void coroutine() {
    body(given);
    ended = true;
    _longjmp(scheduler, 1);
}

// Contexts only begin coroutines: changing between them later needs no call of the system.
__attribute__((noinline)) static bool runs_on(int thread, char* stack) {
    threadIdx.x = thread, ended = false;
    if (!_setjmp(scheduler)) {
        if (started[thread]) _longjmp(places[thread], 1);
        started[thread] = true, shuffles[thread] = 0;
        getcontext(&context);
        context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = STACK;
        makecontext(&context, coroutine, 0);
        setcontext(&context);
    }
    return !ended;
}

static void launch(void (*kernel)(void**), int blocks, int threads, void** arguments) {
    std::unique_ptr<char[]> stacks(new char[STACK * threads]);
    body = kernel, given = arguments, blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        for (int thread = 0; thread < threads; ++thread) started[thread] = false;
        std::vector<int> alive;
        for (int thread = 0; thread < threads; ++thread)
            if (runs_on(thread, &stacks[STACK * thread]))
                alive.push_back(thread);
            else if (block == 0 && thread == 0)
                break;
        if (block == 0 && alive.empty()) {  // a kernel without shuffles: its threads are plain calls
            for (; block < blocks; ++block)
                for (int thread = block == 0; thread < threads; ++thread) {
                    blockIdx.x = block, threadIdx.x = thread;
                    kernel(arguments);
                }
            return;
        }
        while (!alive.empty()) {
            std::vector<int> still;
            for (int thread : alive)
                if (runs_on(thread, nullptr)) still.push_back(thread);
            alive = still;
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
