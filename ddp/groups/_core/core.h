/* Collectives between the processes of one host, over memory that they share.
 *
 * Theory of operation
 * -------------------
 * The members of a group map one anonymous file. It has a page of state, two staging buffers per member, and a large
 * sparse region per member. Tensors can be allocated in this region, so that peers read them without a copy. The file
 * has no name. The kernel frees the memory when the last process ends, also after SIGKILL.
 *
 * Everything uses one primitive, the *phase* (segment.c): a member arrives, and continues when all have arrived. The
 * data moves in *turns* (collectives.c). Turn t uses staging buffer t mod 2. A member that writes for turn t+2 has seen
 * all members arrive in turn t+1, and a member arrives there only after it has read the data of turn t. So two buffers
 * are enough, without another handshake. In the first phase of an operation the members also compare their calls. If
 * the calls differ, all members detect it, and no tensor is changed.
 *
 * Each element is reduced by one member, in the order of ranks, and copied to the others. So results have the same
 * bits on all ranks and in every run. With several hosts, some members of each host are *leaders*: a leader reduces a
 * slice, and then sums it with the other hosts over a TCP ring (ring.c). The ring also compares the calls of the hosts.
 *
 * Operations run in the order in which they were posted (queue.c). They run on a thread of the group, or on the thread
 * that waits for an operation that has not started, which saves two thread switches.
 *
 * A wait checks every few milliseconds whether it must stop: the socket of a member has closed, another member has
 * recorded a failure in the shared page, the deadline has passed, or a signal has arrived. After a failure the group
 * cannot be used again.
 */
#ifndef DDP_CORE_H
#define DDP_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum kind { BARRIER, ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE, KINDS };
enum element { F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL, ELEMENTS };
enum reduction { SUM, PRODUCT, MINIMUM, MAXIMUM, BIT_AND, BIT_OR, BIT_XOR, REDUCTIONS };
enum reason { INTACT, DIED, LEFT, LATE, ABORTED, MISMATCH, INTERRUPTED, LINK_LOST, HOST_LATE };

#define LINE 64
#define MAX_MEMBERS 256
#define NOWHERE UINT64_MAX
#define SMALL 16384 /* bytes; up to this size each member reduces all data: one phase instead of two */
#define RING_SCRATCH (1 << 18)
#define WORDS 768
#define LABEL 96

/* A piece of a user's tensor list, at `start` of the list seen as one flat array of bytes. */
struct span {
    char *at;
    size_t start, bytes;
};

struct spans {
    struct span *pieces;
    int number;
    size_t bytes;
};

struct operation {
    struct operation *following;
    uint64_t ticket;
    enum kind kind;
    enum element element;
    enum reduction reduction;
    int root;
    size_t count;       /* elements of each member's input; for reduce-scatter, of its output */
    double divisor;     /* 1 when the result is not divided */
    uint64_t tag;       /* what DDP averages, see below; 0 for all other calls */
    double timeout_s, deadline;
    struct spans input, output;
};

/* A tag says which bucket of which averaged step it is, and of which wrapper and plan (ddp/reducer/bucket_sender.py). */
#define TAG_BUCKET(tag) ((unsigned)((tag) & 0xfff))
#define TAG_STEP(tag) ((unsigned)((tag) >> 12 & 0xfffffff))

/* The call of a member, for the comparison. */
struct notice {
    uint32_t kind, element, reduction, root;
    uint64_t count, place; /* place: offset of its data in the shared file, or NOWHERE */
    double divisor;
    uint64_t tag;
};

struct member {
    _Alignas(LINE) struct notice notices[2];
    _Alignas(LINE) _Atomic uint32_t arrived; /* number of phases; shows which member is missing */
    _Atomic uint32_t left;
    _Atomic uint32_t awaits; /* the number of the host that it waits for on the ring, plus one; or 0 */
    char words[WORDS];       /* how the calls of the hosts differ, if this member detected it */
};

/* The call of a host, as it is sent on the ring. */
struct statement {
    uint32_t kind, element, reduction, unused; /* kind KINDS: its own ranks disagree */
    uint64_t count, following;                 /* following: bytes of data until the next statement */
    double divisor;
    uint64_t tag;
};
#define UNSAID (KINDS + 1) /* the kind of a statement that has not been received */

struct host {
    char label[LABEL]; /* its ranks and its name, for messages */
    struct statement said;
};

struct shared {
    _Alignas(LINE) _Atomic uint32_t arrivals;
    _Alignas(LINE) _Atomic uint32_t phase;
    _Atomic uint32_t sleepers;
    _Alignas(LINE) _Atomic uint64_t broken; /* reason, culprit, and the member that detected it; 0: no failure */
    struct member members[MAX_MEMBERS];
};

struct block {
    struct block *following;
    size_t begin, end; /* offsets in the shared file */
};

/* The mapping. It stays after its group is closed, as long as a tensor uses it. */
struct segment {
    _Atomic int users;
    pthread_mutex_t mutex;
    int file;
    pid_t owner;
    char *base;
    size_t length, staging, region, mine, mine_end;
    struct block *blocks;
    struct segment *next_segment;
};

struct ring {
    int nodes, node;
    int next, previous; /* sockets; -1 if this member is not a leader */
    int next_rank, previous_rank;
    char *scratch;
    struct host *hosts;
};

struct group {
    struct segment *segment;
    struct shared *shared;
    struct ring ring;
    int size, me;
    int leaders; /* how many members each reduce a slice and send it to other hosts */
    int peers[MAX_MEMBERS], ranks[MAX_MEMBERS];
    int spins;
    uint32_t phase, turn, sequence;
    char *scratch;
    int (*interrupted)(void); /* set while a thread that may get signals executes */

    pthread_mutex_t mutex;
    pthread_cond_t posted, finished;
    pthread_t worker;
    int has_worker, running, closed;
    _Atomic int stopping, forked;
    struct operation *first, *last;
    uint64_t posted_ticket, wanted_ticket, done_ticket, failed_from;
    char failure[1024];
    struct group *next_group;
};

/* kernels.c */
extern const size_t element_bytes[ELEMENTS];
extern const char *const element_names[ELEMENTS];
void reduce(enum element, enum reduction, double divisor, size_t count, int sources, const char *const *from,
            int targets, char *const *to);
void divide(enum element, double divisor, size_t count, char *data);
const char *kernels_in_use(void); /* "avx512", "avx2", "neon" or "plain" */
int use_kernels(const char *name); /* for tests; 0 if this CPU cannot run them. Not while a group is at work */

/* segment.c */
double now(void);
int segment_open(struct segment **, int file, int members, int me, size_t staging, size_t region);
void segment_release(struct segment *);
size_t segment_length(int members, size_t staging, size_t region);
char *staging_of(struct group *, int member);
uint64_t place_of(struct segment *, const char *at, size_t bytes);
char *segment_allocate(struct segment *, size_t bytes);
void segment_free(struct segment *, char *at);
void arrive(struct group *);
int await_phase(struct group *, struct operation *);
enum { IN_PHASE = 1, ON_THE_RING = 2 };
int look_around(struct group *, struct operation *, int members_too);
int fail(struct group *, enum reason, int culprit);
void describe_failure(struct group *, struct operation *, char *text, size_t room);

/* collectives.c */
int execute(struct group *, struct operation *);
void describe_tag(uint64_t tag, char *text, size_t room);
extern const char *const kind_names[KINDS];

/* ring.c */
int ring_reduce(struct group *, struct operation *, enum element, enum reduction, char *data, size_t count);
void ring_refuse(struct group *);

/* queue.c */
int queue_start(struct group *);
uint64_t queue_post(struct group *, struct operation *, int for_the_worker);
int queue_run(struct group *, struct operation *, int (*interrupted)(void));
int queue_wait(struct group *, uint64_t ticket, double timeout_s, int may_execute, int (*interrupted)(void));
int queue_done(struct group *, uint64_t ticket);
void queue_want(struct group *, uint64_t ticket);
void queue_stop(struct group *);
void remember_group(struct group *);
void forget_group(struct group *);

/* signals.c */
int guard(int number, double grace_s);
int overdue(void);
void forget_ignored(void);

enum { DONE = 0, FAILED = -1, NOT_YET = -2, BROKEN_OFF = -3 };

#endif
