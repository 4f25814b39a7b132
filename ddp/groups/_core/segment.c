/* The shared file: phases and failures, and the memory that tensors can be allocated in. */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, YIELDS = 60, LOOK_EVERY_MS = 20 };

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- layout ------------------------------------------------------------------------------------------------- */

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static size_t staging_begin(void) { return pages(sizeof(struct shared)); }

static size_t regions_begin(int members, size_t staging) {
    return staging_begin() + (size_t)members * 2 * pages(staging);
}

size_t segment_length(int members, size_t staging, size_t region) {
    return regions_begin(members, staging) + (size_t)members * pages(region);
}

char *staging_of(struct group *g, int member) {
    size_t buffer = (size_t)member * 2 + (g->turn & 1);
    return g->segment->base + staging_begin() + buffer * pages(g->segment->staging);
}

/* --- fork --------------------------------------------------------------------------------------------------------
 * A child can read and write the tensors that it inherits. It gets a private view of their memory: the kernel copies
 * the pages that it writes. The rest of the file is not mapped in a child. */

static struct segment *all_segments;
static pthread_mutex_t segments_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void) {
    pthread_mutex_lock(&segments_mutex);
    for (struct segment *s = all_segments; s; s = s->next_segment) pthread_mutex_lock(&s->mutex);
}

static void after_fork(void) {
    for (struct segment *s = all_segments; s; s = s->next_segment) pthread_mutex_unlock(&s->mutex);
    pthread_mutex_unlock(&segments_mutex);
}

/* If this fails, an access by the child is a fault: it must not write to the memory of its parent. */
static void make_private(struct segment *s) {
    mmap(s->base, s->length, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (struct block *b = s->blocks; b; b = b->following)
        mmap(s->base + b->begin, b->end - b->begin, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE,
             s->file, (off_t)b->begin);
}

static void in_the_child(void) {
    for (struct segment *s = all_segments; s; s = s->next_segment) {
        s->owner = -1;
        make_private(s);
    }
    after_fork();
    all_segments = NULL;
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_the_child); }

static void remember_segment(struct segment *s) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&segments_mutex);
    s->next_segment = all_segments;
    all_segments = s;
    pthread_mutex_unlock(&segments_mutex);
}

static void forget_segment(struct segment *s) {
    pthread_mutex_lock(&segments_mutex);
    struct segment **link = &all_segments;
    while (*link && *link != s) link = &(*link)->next_segment;
    if (*link) *link = s->next_segment;
    pthread_mutex_unlock(&segments_mutex);
}

/* ------------------------------------------------------------------------------------------------------------------ */

int segment_open(struct segment **made, int file, int members, int me, size_t staging, size_t region) {
    struct segment *s = calloc(1, sizeof *s);
    if (!s) return -1;
    s->length = segment_length(members, staging, region);
    s->base = mmap(NULL, s->length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    s->file = fcntl(file, F_DUPFD_CLOEXEC, 3);
    if (s->base == MAP_FAILED || s->file < 0) {
        int error = errno;
        if (s->base != MAP_FAILED) munmap(s->base, s->length);
        free(s);
        errno = error;
        return -1;
    }
    s->staging = staging;
    s->region = pages(region);
    s->mine = regions_begin(members, staging) + (size_t)me * s->region;
    s->mine_end = s->mine + s->region;
    s->owner = getpid();
    s->users = 1;
    pthread_mutex_init(&s->mutex, NULL);
    remember_segment(s);
    *made = s;
    return 0;
}

void segment_release(struct segment *s) {
    if (atomic_fetch_sub(&s->users, 1) != 1) return;
    forget_segment(s);
    munmap(s->base, s->length);
    close(s->file);
    while (s->blocks) {
        struct block *b = s->blocks;
        s->blocks = b->following;
        free(b);
    }
    pthread_mutex_destroy(&s->mutex);
    free(s);
}

/* --- memory for tensors --------------------------------------------------------------------------------------- */

uint64_t place_of(struct segment *s, const char *at, size_t bytes) {
    const char *mine = s->base + s->mine, *end = s->base + s->mine_end;
    return at >= mine && at < end && bytes <= (size_t)(end - at) ? (uint64_t)(at - s->base) : NOWHERE;
}

/* First fit, in the order of addresses. Each block is a user of the segment. */
char *segment_allocate(struct segment *s, size_t bytes) {
    struct block *b = malloc(sizeof *b);
    if (!b) return NULL;
    size_t wanted = pages(bytes ? bytes : 1), begin = s->mine;
    pthread_mutex_lock(&s->mutex);
    struct block **link = &s->blocks;
    while (*link && (*link)->begin - begin < wanted) {
        begin = (*link)->end;
        link = &(*link)->following;
    }
    int fits = *link || s->mine_end - begin >= wanted;
    if (fits) {
        *b = (struct block){*link, begin, begin + wanted};
        *link = b;
        atomic_fetch_add(&s->users, 1);
    }
    pthread_mutex_unlock(&s->mutex);
    if (!fits) {
        free(b);
        return NULL;
    }
    return s->base + begin;
}

/* A block that a forked child frees still belongs to its parent. */
void segment_free(struct segment *s, char *at) {
    if (getpid() != s->owner) return;
    pthread_mutex_lock(&s->mutex);
    struct block **link = &s->blocks, *b;
    while (s->base + (*link)->begin != at) link = &(*link)->following;
    b = *link;
    *link = b->following;
    fallocate(s->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)b->begin, (off_t)(b->end - b->begin));
    pthread_mutex_unlock(&s->mutex);
    free(b);
    segment_release(s);
}

/* --- phases --------------------------------------------------------------------------------------------------- */

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    struct timespec slice = {0, LOOK_EVERY_MS * 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void arrive(struct group *g) {
    struct shared *s = g->shared;
    uint32_t next = ++g->phase;
    atomic_store_explicit(&s->members[g->me].arrived, next, memory_order_relaxed);
    if (atomic_fetch_add(&s->arrivals, 1) + 1 == next * (uint32_t)g->size) {
        atomic_store(&s->phase, next);
        if (atomic_load(&s->sleepers)) wake(&s->phase);
    }
}

static int passed(struct group *g) {
    return (int32_t)(atomic_load_explicit(&g->shared->phase, memory_order_acquire) - g->phase) >= 0;
}

int await_phase(struct group *g, struct operation *op) {
    for (int i = 0; i < g->spins; i++) {
        if (passed(g)) return 0;
        relax();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (passed(g)) return 0;
        sched_yield();
    }
    struct shared *s = g->shared;
    for (int slice = 0; !passed(g); slice++) {
        if (look_around(g, op, slice > 0 ? IN_PHASE : 0)) return -1;
        uint32_t seen = atomic_load(&s->phase);
        atomic_fetch_add(&s->sleepers, 1);
        if (atomic_load(&s->phase) == seen && (int32_t)(seen - g->phase) < 0) sleep_on(&s->phase, seen);
        atomic_fetch_sub(&s->sleepers, 1);
    }
    return 0;
}

/* --- failures ------------------------------------------------------------------------------------------------- */

/* All members report the first failure that any member records. */
int fail(struct group *g, enum reason reason, int culprit) {
    uint64_t none = 0, word = (uint64_t)reason << 56 | (uint64_t)(uint32_t)culprit << 24 | (uint64_t)g->me;
    atomic_compare_exchange_strong(&g->shared->broken, &none, word);
    wake(&g->shared->phase);
    return -1;
}

static int missing(struct group *g) {
    for (int r = 0; r < g->size; r++) {
        uint32_t theirs = atomic_load(&g->shared->members[r].arrived);
        if ((int32_t)(theirs - g->phase) < 0) return r;
    }
    return g->me;
}

/* A member that has left had completed its operations: a member that still waits for it made an extra call. */
static int gone(struct group *g) {
    struct pollfd sockets[MAX_MEMBERS];
    for (int r = 0; r < g->size; r++) sockets[r] = (struct pollfd){g->peers[r], POLLIN | POLLRDHUP, 0};
    if (poll(sockets, (nfds_t)g->size, 0) <= 0) return -1;
    for (int r = 0; r < g->size; r++)
        if (sockets[r].revents) return r;
    return -1;
}

/* A member that waits on the ring is not late itself. */
static int fail_late(struct group *g) {
    int member = missing(g);
    uint32_t host = atomic_load(&g->shared->members[member].awaits);
    return host ? fail(g, HOST_LATE, (int)host - 1) : fail(g, LATE, g->ranks[member]);
}

int look_around(struct group *g, struct operation *op, int members_too) {
    if (atomic_load(&g->shared->broken)) return -1;
    if (g->stopping) return fail(g, ABORTED, g->ranks[g->me]);
    if (!members_too) return 0;
    int culprit = gone(g);
    if (culprit >= 0) {
        if (members_too == IN_PHASE && passed(g)) return 0;
        int left = atomic_load(&g->shared->members[culprit].left);
        return fail(g, left ? LEFT : DIED, g->ranks[culprit]);
    }
    if (g->interrupted && g->interrupted()) return fail(g, INTERRUPTED, g->ranks[g->me]);
    return now() > op->deadline ? fail_late(g) : 0;
}

void describe_failure(struct group *g, struct operation *op, char *text, size_t room) {
    uint64_t word = atomic_load(&g->shared->broken);
    int culprit = (int)(uint32_t)(word >> 24), by = g->ranks[word & 0xffff];
    const char *what = kind_names[op->kind], *label;
    switch ((enum reason)(word >> 56)) {
        case DIED:
            snprintf(text, room, "rank %d died (noticed by rank %d); this rank was in %s", culprit, by, what);
            break;
        case LEFT:
            snprintf(text, room, "rank %d has left the process group; this rank still called %s", culprit, what);
            break;
        case LATE:
            snprintf(text, room, "rank %d has not joined %s in time; rank %d waited %.1f s for it", culprit, what,
                     by, op->timeout_s);
            break;
        case HOST_LATE:
            label = g->ring.hosts[culprit].label;
            snprintf(text, room, "%s%s has not joined %s in time; rank %d waited %.1f s for it",
                     strncmp(label, "ranks ", 6) ? "" : "one of ", label, what, by, op->timeout_s);
            break;
        case ABORTED:
            snprintf(text, room, "rank %d aborted the process group; this rank was in %s", culprit, what);
            break;
        case INTERRUPTED:
            snprintf(text, room, "a signal interrupted rank %d; this rank was in %s", culprit, what);
            break;
        case LINK_LOST:
            snprintf(text, room, "rank %d lost its connection to rank %d on another host; this rank was in %s", by,
                     culprit, what);
            break;
        default:
            snprintf(text, room, "%s", g->shared->members[word & 0xffff].words);
    }
}
