/* Threads that share the chunks of one job at a time.
 *
 * One word, `state`, holds the number of the last job, whether it still takes threads in, and how many are inside. The
 * caller opens a job and works on it as all do: chunks are claimed one by one, so that fast and slow cores finish
 * together. When there are none left it closes the job and waits for the threads inside only: one that is still asleep
 * comes too late and costs nothing. Idle threads spin for SPIN_NS, as the next matmul of a token is near, then sleep.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define SPIN_NS 50000
#define OPEN ((uint64_t)1 << 31)
#define INSIDE (OPEN - 1)
#define NEXT_JOB (OPEN << 1)
#define ALIGNMENT 64 /* a cache line; what vectors like */

struct pool {
    _Alignas(ALIGNMENT) _Atomic uint64_t state;
    _Alignas(ALIGNMENT) _Atomic int64_t next; /* chunk to claim */
    _Alignas(ALIGNMENT) _Atomic int32_t sleepers;
    _Atomic int stopping;
    void (*work)(const void *job, int64_t chunk);
    const void *job;
    int64_t chunks;
    pthread_mutex_t entrance; /* held by the caller */
    pthread_mutex_t mutex;    /* for going to sleep */
    pthread_cond_t wake;
    uint8_t *scratch;
    size_t scratch_bytes;
    void *memory, *scratch_memory; /* where they were before they were aligned */
    int32_t count; /* of threads, without the caller */
    pthread_t threads[];
};

/* The first aligned byte of memory that has ALIGNMENT bytes too many: malloc aligns to 16 only. */
static void *align(void *memory) { return (uint8_t *)memory + (ALIGNMENT - (uintptr_t)memory % ALIGNMENT); }

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait a little for another thread inside; after so many times the core of which may be ours. */
static void pause_longer(int spins) {
    if (spins < 1000) pause_briefly();
    else sched_yield();
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void claim_chunks(struct pool *pool) {
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (chunk >= pool->chunks) return;
        pool->work(pool->job, chunk);
    }
}

static int is_new(uint64_t state, uint64_t seen) { return (state & OPEN) && state / NEXT_JOB != seen; }

/* Wait for a job that is open and has another number than `seen`, or the end. */
static void await_job(struct pool *pool, uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (is_new(atomic_load(&pool->state), seen) || atomic_load(&pool->stopping)) return;
            pause_briefly();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1); /* before looking again: who opens a job looks at this after it */
    while (!is_new(atomic_load(&pool->state), seen) && !atomic_load(&pool->stopping))
        pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *serve(void *argument) {
    struct pool *pool = argument;
    uint64_t seen = 0;
    while (!atomic_load(&pool->stopping)) {
        uint64_t state = atomic_load(&pool->state);
        if (!is_new(state, seen)) {
            await_job(pool, seen);
        } else if (atomic_compare_exchange_strong(&pool->state, &state, state + 1)) {
            seen = state / NEXT_JOB;
            claim_chunks(pool);
            atomic_fetch_sub(&pool->state, 1);
        }
    }
    return NULL;
}

static void wake_sleepers(struct pool *pool) {
    if (!atomic_load(&pool->sleepers)) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(struct pool *pool, void (*work)(const void *job, int64_t chunk), const void *job, int64_t chunks) {
    if (!pool->count || chunks < 2) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) work(job, chunk);
        return;
    }
    pool->work = work;
    pool->job = job;
    pool->chunks = chunks;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->state, (atomic_load(&pool->state) / NEXT_JOB + 1) * NEXT_JOB | OPEN);
    wake_sleepers(pool);
    claim_chunks(pool);
    atomic_fetch_and(&pool->state, ~OPEN);
    for (int spins = 0; atomic_load(&pool->state) & INSIDE; spins++) pause_longer(spins);
}

void pool_await(const _Atomic int64_t *counter, int64_t least) {
    for (int spins = 0; atomic_load_explicit(counter, memory_order_acquire) < least; spins++) pause_longer(spins);
}

uint8_t *pool_enter(struct pool *pool) {
    pthread_mutex_lock(&pool->entrance);
    return pool->scratch;
}

void pool_leave(struct pool *pool) { pthread_mutex_unlock(&pool->entrance); }

int32_t pool_threads(const struct pool *pool) { return pool->count + 1; }

int pool_reserve(struct pool *pool, size_t bytes) {
    int done = 1;
    pthread_mutex_lock(&pool->entrance);
    if (bytes > pool->scratch_bytes) {
        void *larger = malloc(bytes + ALIGNMENT);
        done = larger != NULL;
        if (done) {
            free(pool->scratch_memory);
            pool->scratch_memory = larger;
            pool->scratch = align(larger);
            pool->scratch_bytes = bytes;
        }
    }
    pthread_mutex_unlock(&pool->entrance);
    return done;
}

void pool_stop(struct pool *pool) {
    pthread_mutex_lock(&pool->entrance);
    atomic_store(&pool->stopping, 1);
    wake_sleepers(pool);
    while (pool->count) pthread_join(pool->threads[--pool->count], NULL);
    pthread_mutex_unlock(&pool->entrance);
}

void pool_free(struct pool *pool) {
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    pthread_mutex_destroy(&pool->entrance);
    free(pool->scratch_memory);
    free(pool->memory);
}

struct pool *pool_open(int32_t threads) {
    struct pool *pool;
    void *memory = calloc(1, ALIGNMENT + sizeof *pool + (size_t)threads * sizeof *pool->threads);
    if (!memory) return NULL;
    pool = align(memory);
    pool->memory = memory;
    pthread_mutex_init(&pool->entrance, NULL);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (; pool->count < threads - 1; pool->count++) {
        if (pthread_create(&pool->threads[pool->count], NULL, serve, pool)) {
            pool_stop(pool);
            pool_free(pool);
            return NULL;
        }
    }
    return pool;
}
