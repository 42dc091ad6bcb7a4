/* Files that are mapped into memory and cannot be read: where the disk fails, or the file has become shorter, the process
 * gets a signal that would end it. In ranges that are guarded, what cannot be read is zeros instead, and the range is
 * known to be broken from then on. It costs nothing as long as all can be read. */
#define _GNU_SOURCE
#include "library.h"

#if defined(__linux__)
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANGES = 64 };

struct range {
    _Atomic(uintptr_t) start, end; /* both 0: nothing is guarded */
    atomic_int broken;
};

static struct range ranges[RANGES];
static uintptr_t page_size;
static struct sigaction before;

static void on_bus_error(int signal, siginfo_t *info, void *context) {
    (void)context;
    const uintptr_t at = (uintptr_t)info->si_addr;
    for (struct range *range = ranges; info->si_code > 0 && range < ranges + RANGES; range++) {
        if (at < range->start || at >= range->end) continue;
        void *page = (void *)(at / page_size * page_size);
        if (mmap(page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
        range->broken = 1;
        return;
    }
    sigaction(signal, &before, NULL); /* what was read is read again, and ends as it would have */
    if (info->si_code <= 0) raise(signal);
}

/* Guard so many bytes of a mapped file. Not to be called by two threads at a time.
 *
 * Returns its number, or -1: there are too many, or the system does not allow it. */
EXPORT int32_t motley_guard(void *start, int64_t size) {
    if (!page_size) {
        struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        if (sigaction(SIGBUS, &action, &before)) return -1;
    }
    for (int32_t number = 0; number < RANGES; number++) {
        struct range *range = ranges + number;
        if (range->end) continue;
        range->broken = 0;
        range->start = (uintptr_t)start;
        range->end = (uintptr_t)start + (uintptr_t)size;
        return number;
    }
    return -1;
}

/* Whether something in a guarded range could not be read. */
EXPORT int32_t motley_is_broken(int32_t number) { return ranges[number].broken; }

EXPORT void motley_unguard(int32_t number) { ranges[number].end = 0; }

#else /* Windows ends a process that reads what cannot be read */

EXPORT int32_t motley_guard(void *start, int64_t size) {
    (void)start, (void)size;
    return -1;
}

EXPORT int32_t motley_is_broken(int32_t number) {
    (void)number;
    return 0;
}

EXPORT void motley_unguard(int32_t number) { (void)number; }
#endif
