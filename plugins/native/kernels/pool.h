/* Threads that share the chunks of one job at a time. */
#ifndef MOTLEY_POOL_H
#define MOTLEY_POOL_H
#include <stddef.h>
#include <stdint.h>

struct pool;

struct pool *pool_open(int32_t threads);          /* NULL if the system refuses memory or a thread */
void pool_stop(struct pool *pool);                /* joins the threads; jobs then run on their caller alone */
void pool_free(struct pool *pool);                /* after pool_stop */
int32_t pool_threads(const struct pool *pool);    /* the caller among them */
int pool_reserve(struct pool *pool, size_t bytes); /* at least this much scratch; 0 if there is no memory */

/* A caller has the pool, its scratch included, to itself from pool_enter to pool_leave. */
uint8_t *pool_enter(struct pool *pool);
void pool_leave(struct pool *pool);

/* Between the two: work(job, chunk) for every chunk in [0, chunks), on any thread, in any order; returns after all. */
void pool_run(struct pool *pool, void (*work)(const void *job, int64_t chunk), const void *job, int64_t chunks);

/* Within a job: wait until other chunks, which were claimed before, have raised a counter (memory_order_release) so far. */
void pool_await(const _Atomic int64_t *counter, int64_t least);
#endif
