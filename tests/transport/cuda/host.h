// What the kernels need of CUDA, on the host, in the place of device.cuh. The threads of a warp are coroutines of one
// thread; a shuffle lets the others of the warp come to the same place. They change places often: by GCC's own jumps, and
// by variables that are found without a call (-ftls-model). Warps of a block run one after the other, each up to the block's
// next barrier.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)

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
static unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
    const unsigned long long all = (unsigned long long)high << 32 | low;
    unsigned made = 0;
    for (int i = 0; i < 4; ++i) made |= unsigned(all >> 8 * (chosen >> 4 * i & 7) & 0xFF) << 8 * i;
    return made;
}
static uint4 read_once(const void* from) { return *static_cast<const uint4*>(from); }
static void wait_for_previous() {}
template <class Type> static Type computed_once(Type value) { return value; }
static unsigned short float_to_half(float value) { return bits_of<unsigned short>(_Float16(value)); }
// Addresses of the device that are in memory are told from the host's as in host_driver.py.
static float* floats_at(unsigned long long address) { return reinterpret_cast<float*>(address - (1ull << 60)); }

constexpr int OF_A_WARP = 32, LAUNCHING = OF_A_WARP;
constexpr int STACK = (1 << 15) + 320;  // no power of two: stacks would be in the way of each other in caches
constexpr std::size_t SHARED = 48 << 10;  // bytes that a block may share without asking for more
constexpr int TOLD = 10;                  // the most words that a lane tells the others at once

// A copy to shared memory that is under way.
struct Copy {
    void* to;
    const void* from;  // null: zeros
    int bytes;
};

// The lanes of a warp. They stay from launch to launch, as it takes calls of the system to begin one.
struct Warp {
    unsigned told[2][OF_A_WARP][TOLD];
    int meetings[OF_A_WARP];
    int next[OF_A_WARP], before;  // a ring of those that have not ended, and who of them had its turn before
    int living, waiting, first_waiting;  // lanes that have not ended, and those of them at the block's barrier
    bool met;
    void* places[OF_A_WARP + 1][5];
    bool begun[OF_A_WARP + 1] = {};
    unsigned first;  // thread of the warp
    std::vector<std::vector<Copy>> copies[OF_A_WARP];  // of each lane, in groups; the last one is not committed yet
    ucontext_t context;
    std::unique_ptr<char[]> stacks{new char[STACK * OF_A_WARP]};
};

// What one thread of the host launches.
struct Launch {
    void (*body)(void**);
    void** given;
    std::vector<std::unique_ptr<Warp>> warps;  // as many as have been under way at once
    alignas(128) char shared[SHARED];
    bool filled;  // whether the block's shared memory has been made unlike anything that was there before
};
static thread_local Launch* launched;
static thread_local Warp* own;

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

// Waits until all lanes have come here; afterwards a lane finds what it and the others have `told` in this meeting.
static int meet(int lane) {
    const int turn = own->meetings[lane]++ % 2;
    own->before = lane;
    give_way(lane, own->next[lane]);
    return turn;
}

static float __shfl_sync(unsigned, float value, int from) {
    const int lane = threadIdx.x % OF_A_WARP;
    own->told[own->meetings[lane] % 2][lane][0] = __float_as_uint(value);
    const int turn = meet(lane);
    return __uint_as_float(own->told[turn][from][0]);
}

static float __shfl_xor_sync(unsigned mask, float value, int distance) {
    return __shfl_sync(mask, value, (threadIdx.x % OF_A_WARP) ^ distance);
}

static void __syncwarp() { meet(threadIdx.x % OF_A_WARP); }

// The last lane of a warp that comes here lets the other warps come as far.
static void __syncthreads() {
    const int lane = threadIdx.x % OF_A_WARP;
    own->met = true, own->before = lane;
    if (own->waiting++ == 0) own->first_waiting = lane;
    assert(own->waiting <= own->living);
    give_way(lane, own->waiting == own->living ? LAUNCHING : own->next[lane]);
}

template <class Block>
static Block& shared_memory() {
    static_assert(sizeof(Block) <= SHARED && alignof(Block) <= 128, "a block shares too much");
    if (!launched->filled) std::memset(launched->shared, 0xFF, SHARED);
    launched->filled = true;
    return *reinterpret_cast<Block*>(launched->shared);
}

// Nothing is there until its group has been waited for, and nothing else is there any more.
template <int BYTES>
static void copy_async(void* to, const void* from, bool there) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "");
    assert(std::uintptr_t(to) % BYTES == 0 && std::uintptr_t(from) % BYTES == 0);
    assert(to >= launched->shared && static_cast<char*>(to) + BYTES <= launched->shared + SHARED);
    std::memset(to, 0xFF, BYTES);
    auto& groups = own->copies[threadIdx.x % OF_A_WARP];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({to, there ? from : nullptr, BYTES});
}

static void commit_copies() { own->copies[threadIdx.x % OF_A_WARP].emplace_back(); }

template <int LEFT>
static void wait_for_copies() {
    auto& groups = own->copies[threadIdx.x % OF_A_WARP];
    const int done = std::max(0, int(groups.size()) - 1 - LEFT);
    for (int group = 0; group < done; ++group)
        for (const Copy& copy : groups[group])
            copy.from ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
    groups.erase(groups.begin(), groups.begin() + done);
}

static void read_tiles(unsigned (&words)[4], const void* row) {
    assert(std::uintptr_t(row) % 16 == 0);
    const int lane = threadIdx.x % OF_A_WARP;
    std::memcpy(own->told[own->meetings[lane] % 2][lane], &row, sizeof row);
    const auto& rows = own->told[meet(lane)];
    for (int tile = 0; tile < 4; ++tile) {
        const unsigned* from;
        std::memcpy(&from, rows[tile * 8 + lane / 4], sizeof from);
        words[tile] = from[lane % 4];
    }
}

// As PTX describes mma.m16n8k32 and mma.m16n8k16 of signed bytes: who has which elements of A, B and C, where k is WORDS * 16.
// Lane 4 g + t has of A: rows g and g + 8 at columns 4 t.. to 4 t + 3, then the same 16 columns on; of B: rows 4 t to 4 t + 3 of
// column g, then the same 16 rows on; of C: row g at columns 2 t and 2 t + 1, then row g + 8.
template <int WORDS>
static void multiply_tiles(int (&sums)[4], const unsigned (&a)[2 * WORDS], const unsigned (&b)[WORDS], const int (&c)[4]) {
    static_assert(3 * WORDS <= TOLD, "");
    const int lane = threadIdx.x % OF_A_WARP;
    unsigned* told = own->told[own->meetings[lane] % 2][lane];
    for (int i = 0; i < 2 * WORDS; ++i) told[i] = a[i];
    for (int i = 0; i < WORDS; ++i) told[2 * WORDS + i] = b[i];
    const auto& of = own->told[meet(lane)];
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        sums[i] = c[i];
        for (int k = 0; k < 16 * WORDS; ++k) {
            const unsigned left = of[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
            const unsigned right = of[column * 4 + k % 16 / 4][2 * WORDS + k / 16];
            sums[i] += static_cast<signed char>(left >> k % 4 * 8) * static_cast<signed char>(right >> k % 4 * 8);
        }
    }
}

static bool is_without_meetings() { return blockIdx.x == 0 && own->first == 0 && own->meetings[0] == 0 && !own->met; }

static void coroutine() {
    for (;;) {
        launched->body(launched->given);
        const int lane = threadIdx.x % OF_A_WARP, next = own->next[lane];
        for (const auto& group : own->copies[lane]) assert(group.empty());  // it might arrive in the place of something else
        own->next[own->before] = next, --own->living;
        const bool all_wait = own->waiting && own->waiting == own->living;
        give_way(lane, next == lane || all_wait || (lane == 0 && is_without_meetings()) ? LAUNCHING : next);
    }
}

// Begins a warp that has ended; returns when it has again, or waits at the block's barrier.
static void start(Warp* warp, int first, int threads) {
    own = warp, own->first = first, own->met = false, own->waiting = 0;
    own->living = std::min(OF_A_WARP, threads - first), own->before = own->living - 1;
    for (int lane = 0; lane < own->living; ++lane) {
        own->meetings[lane] = 0, own->next[lane] = lane + 1;
        own->copies[lane].clear();
    }
    own->next[own->living - 1] = 0;
    give_way(LAUNCHING, 0);
}

static void go_on(Warp* warp) {
    own = warp, own->waiting = 0;
    give_way(LAUNCHING, own->first_waiting);
}

static void launch(void (*kernel)(void**), int blocks, int threads, void** arguments) {
    static thread_local const std::unique_ptr<Launch> kept(new Launch);
    launched = kept.get(), launched->body = kernel, launched->given = arguments, blockDim.x = threads;
    auto& warps = launched->warps;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block, launched->filled = false;
        std::size_t waiting = 0;  // warps, which are the first of `warps`
        for (int first = 0; first < threads; first += OF_A_WARP) {
            if (waiting == warps.size()) warps.emplace_back(new Warp);
            start(warps[waiting].get(), first, threads);
            if (is_without_meetings()) {  // all other threads are plain calls
                for (; block < blocks; ++block)
                    for (int thread = block == 0; thread < threads; ++thread) {
                        blockIdx.x = block, threadIdx.x = thread;
                        kernel(arguments);
                    }
                return;
            }
            if (own->waiting) ++waiting;
        }
        while (waiting) {
            std::size_t still = 0;
            for (std::size_t each = 0; each < waiting; ++each) {
                go_on(warps[each].get());
                if (own->waiting) std::swap(warps[still++], warps[each]);
            }
            waiting = still;
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
