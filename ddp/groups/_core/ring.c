/* All-reduce between hosts: the leaders of all hosts form rings of TCP connections.
 *
 * The array is divided into one block per host. In the first half of the steps, each host adds its own data to the
 * block that it received, and sends the sum to the next host. In the second half, the complete sums are sent around the ring.
 * The data of step s+1 is the data that was received in step s, so the steps overlap: a byte can be sent as soon as it
 * has been received and added. Each block is summed once, and then copied. So results have the same bits on all hosts.
 *
 * In the first half, each block starts with the *statement* of the host where it began: the call of that host, and the
 * number of bytes that follow. So every host has all statements before any result is sent, without separate messages.
 * If a host receives a statement that differs from its own, it stops sending data, but still sends all remaining
 * statements. Each host then knows the calls of all hosts, and all raise the same error.
 */
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { LOOK_EVERY_MS = 20, HEAD = sizeof(struct statement) };

/* The progress of one direction (sending or receiving) through the steps. */
struct journey {
    int step, end, block;
    size_t head, within, total; /* bytes of this step's statement, of its data, of all data */
};

struct passage {
    struct group *group;
    struct operation *operation;
    enum element element;
    enum reduction reduction;
    char *data;
    size_t count, held; /* held: bytes of an element that is not complete yet */
    struct journey out, in;
    struct statement leaving, arriving;
    int disagree;
};

static size_t block_begin(const struct passage *p, int block) {
    size_t nodes = (size_t)p->group->ring.nodes, whole = p->count / nodes, rest = p->count % nodes, b = (size_t)block;
    return (b * whole + (b < rest ? b : rest)) * element_bytes[p->element];
}

static size_t block_bytes(const struct passage *p, int block) {
    return block_begin(p, block + 1) - block_begin(p, block);
}

static int is_stated(const struct passage *p, const struct journey *j) { return j->step < p->group->ring.nodes - 1; }

static size_t step_bytes(const struct passage *p, const struct journey *j) {
    if (!is_stated(p, j)) return block_bytes(p, j->block);
    return j == &p->out ? p->leaving.following : p->arriving.following;
}

static void advance(const struct passage *p, struct journey *j) {
    int nodes = p->group->ring.nodes;
    while (j->step < j->end && !(is_stated(p, j) && j->head < HEAD) && j->within == step_bytes(p, j)) {
        j->step++;
        j->head = j->within = 0;
        j->block = (j->block + nodes - 1) % nodes;
    }
}

/* --- statements ------------------------------------------------------------------------------------------------- */

static int agree(const struct statement *a, const struct statement *b) {
    return a->kind == b->kind && a->element == b->element && a->reduction == b->reduction && a->count == b->count &&
           a->divisor == b->divisor && a->tag == b->tag;
}

/* From now on, send only statements. */
static void stop_data(struct passage *p) {
    p->disagree = 1;
    p->in.end = p->out.end = p->group->ring.nodes - 1;
}

static void read_statement(struct passage *p) {
    struct ring *ring = &p->group->ring;
    struct statement *theirs = &ring->hosts[p->in.block].said;
    *theirs = p->arriving;
    if (!agree(theirs, &ring->hosts[ring->node].said) || theirs->following != block_bytes(p, p->in.block)) stop_data(p);
    if (theirs->kind < KINDS) return;
    /* That host has left the ring, so nothing from the hosts behind it will arrive. */
    p->in.end = p->in.step + 1;
    if (p->out.end > p->in.step + 2) p->out.end = p->in.step + 2;
}

static void describe_statement(const struct statement *s, char *text, size_t room) {
    static const char *const names[REDUCTIONS] = {"sum", "product", "minimum", "maximum", "and", "or", "xor"};
    char divided[32] = "", tag[80] = "";
    if (s->tag) {
        memcpy(tag, ", ", 3);
        describe_tag(s->tag, tag + 2, sizeof tag - 2);
    }
    if (s->divisor != 1) snprintf(divided, sizeof divided, " / %g", s->divisor);
    if (s->kind >= KINDS || s->element >= ELEMENTS || s->reduction >= REDUCTIONS)
        snprintf(text, room, "different collectives on its own ranks");
    else if (s->kind == BARRIER)
        snprintf(text, room, "barrier");
    else
        snprintf(text, room, "%s of %llu x %s (%s%s)%s", kind_names[s->kind], (unsigned long long)s->count,
                 element_names[s->element], names[s->reduction], divided, tag);
}

/* Describe the call of host `first`, and how many other hosts made the same call. */
static void describe_side(const struct ring *ring, int first, char *text, size_t room) {
    char what[192], more[48] = "";
    int others = 0;
    for (int h = first + 1; h < ring->nodes; h++) others += agree(&ring->hosts[h].said, &ring->hosts[first].said);
    if (others) snprintf(more, sizeof more, " and %d more host%s", others, others > 1 ? "s" : "");
    describe_statement(&ring->hosts[first].said, what, sizeof what);
    snprintf(text, room, "%s%s%s called %s", first ? "; " : "", ring->hosts[first].label, more, what);
}

static int is_first_of_its_side(const struct ring *ring, int host) {
    for (int h = 0; h < host; h++)
        if (agree(&ring->hosts[h].said, &ring->hosts[host].said)) return 0;
    return ring->hosts[host].said.kind != UNSAID;
}

static int disagreement(struct passage *p) {
    struct group *g = p->group;
    char *words = g->shared->members[g->me].words;
    size_t used = (size_t)snprintf(words, WORDS, "the ranks disagree: ");
    for (int h = 0; h < g->ring.nodes && used < WORDS - 1; h++) {
        if (!is_first_of_its_side(&g->ring, h)) continue;
        describe_side(&g->ring, h, words + used, WORDS - used);
        used += strlen(words + used);
    }
    return fail(g, MISMATCH, g->ranks[g->me]);
}

/* The ranks of this host made different calls: the other hosts do not have to wait for this host. */
void ring_refuse(struct group *g) {
    struct statement none = {.kind = KINDS};
    if (g->ring.nodes && g->me == g->leaders - 1) send(g->ring.next, &none, HEAD, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* --- bytes ------------------------------------------------------------------------------------------------------ */

/* Find the data that can be sent now. The statement of a step was received in the previous step. */
static size_t sendable(struct passage *p, struct iovec parts[2]) {
    struct journey *out = &p->out, *in = &p->in;
    struct ring *ring = &p->group->ring;
    parts[0] = parts[1] = (struct iovec){NULL, 0}; /* the kernel also looks at the address of no bytes */
    if (out->step >= out->end) return 0;
    if (is_stated(p, out)) {
        if (out->step > in->step + (in->head == HEAD)) return 0;
        if (!out->head) {
            p->leaving = ring->hosts[out->block].said;
            p->leaving.following = p->disagree ? 0 : block_bytes(p, out->block);
        }
        parts[0] = (struct iovec){(char *)&p->leaving + out->head, HEAD - out->head};
    }
    size_t left = step_bytes(p, out) - out->within, allowed = block_bytes(p, ring->node) + in->total - out->total;
    parts[1] = (struct iovec){p->data + block_begin(p, out->block) + out->within, left < allowed ? left : allowed};
    return parts[0].iov_len + parts[1].iov_len;
}

/* Does not wait. 1: moved data; 0: would block; -1: the connection is closed. */
static int send_some(struct passage *p) {
    struct iovec parts[2];
    struct journey *out = &p->out;
    if (!sendable(p, parts)) return 0;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent = sendmsg(p->group->ring.next, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    size_t bytes = (size_t)sent, of_head = bytes < parts[0].iov_len ? bytes : parts[0].iov_len;
    out->head += of_head;
    out->within += bytes - of_head;
    out->total += bytes - of_head;
    advance(p, out);
    return 1;
}

static void add_some(struct passage *p, size_t bytes) {
    size_t one = element_bytes[p->element], whole = (p->held + bytes) / one * one;
    char *scratch = p->group->ring.scratch, *mine = p->data + block_begin(p, p->in.block) + p->in.within;
    const char *from[2] = {scratch, mine};
    reduce(p->element, p->reduction, 1, whole / one, 2, from, 1, &mine);
    p->held = p->held + bytes - whole;
    memmove(scratch, scratch + whole, p->held);
    p->in.within += whole;
    p->in.total += whole;
}

/* Find the address for the next bytes, and their number. */
static struct iovec receivable(struct passage *p) {
    struct journey *in = &p->in;
    char *scratch = p->group->ring.scratch;
    if (is_stated(p, in) && in->head < HEAD) return (struct iovec){(char *)&p->arriving + in->head, HEAD - in->head};
    size_t left = step_bytes(p, in) - in->within - p->held, room = RING_SCRATCH - p->held;
    if (!is_stated(p, in)) return (struct iovec){p->data + block_begin(p, in->block) + in->within, left};
    return (struct iovec){scratch + p->held, left < room ? left : room};
}

static int receive_some(struct passage *p) {
    struct journey *in = &p->in;
    struct iovec to = receivable(p);
    ssize_t got = recv(p->group->ring.previous, to.iov_base, to.iov_len, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    if (!got) return -1;
    if (is_stated(p, in) && in->head < HEAD) {
        in->head += (size_t)got;
        if (in->head == HEAD) read_statement(p);
    } else if (p->disagree) {
        in->within += (size_t)got;
    } else if (is_stated(p, in)) {
        add_some(p, (size_t)got);
    } else {
        in->within += (size_t)got;
        in->total += (size_t)got;
    }
    advance(p, in);
    return 1;
}

/* --- waiting ---------------------------------------------------------------------------------------------------- */

static int awaited_host(const struct passage *p) {
    const struct ring *ring = &p->group->ring;
    if (p->in.step >= p->in.end) return (ring->node + 1) % ring->nodes;
    if (is_stated(p, &p->in) && p->in.head < HEAD) return p->in.block;
    return (ring->node + ring->nodes - 1) % ring->nodes;
}

static int wait_for_bytes(struct passage *p) {
    struct group *g = p->group;
    struct iovec parts[2];
    struct pollfd sockets[2] = {{p->in.step < p->in.end ? g->ring.previous : -1, POLLIN, 0},
                                {sendable(p, parts) ? g->ring.next : -1, POLLOUT, 0}};
    int stirred = poll(sockets, 2, LOOK_EVERY_MS) > 0;
    if (!stirred) atomic_store(&g->shared->members[g->me].awaits, (uint32_t)awaited_host(p) + 1);
    int found_by_others = (enum reason)(atomic_load(&g->shared->broken) >> 56) == MISMATCH;
    if (!found_by_others || g->me < g->leaders - 1 || !is_stated(p, &p->in))
        return look_around(g, p->operation, stirred ? 0 : ON_THE_RING);
    /* Another leader of this host has already detected it. Only the ring of the last leaders always runs. There the
     * statements are sent to the end, so that all hosts get them. */
    if (!p->disagree) stop_data(p);
    return now() > p->operation->deadline ? -1 : 0;
}

static int lost(struct passage *p, int rank) { return fail(p->group, LINK_LOST, rank); }

static int pass_round(struct passage *p) {
    struct ring *ring = &p->group->ring;
    advance(p, &p->out);
    advance(p, &p->in);
    while (p->out.step < p->out.end || p->in.step < p->in.end) {
        int sent = send_some(p);
        int received = p->in.step < p->in.end ? receive_some(p) : 0;
        if (sent < 0) return lost(p, ring->next_rank);
        if (received < 0) return lost(p, ring->previous_rank);
        if (!sent && !received && wait_for_bytes(p)) return -1;
    }
    return p->disagree ? disagreement(p) : 0;
}

/* With no elements it is a barrier. */
int ring_reduce(struct group *g, struct operation *op, enum element element, enum reduction reduction, char *data,
                size_t count) {
    struct ring *ring = &g->ring;
    int nodes = ring->nodes, end = 2 * (nodes - 1);
    struct passage p = {.group = g, .operation = op, .element = element, .reduction = reduction, .data = data,
                        .count = count, .out = {.end = end, .block = ring->node},
                        .in = {.end = end, .block = (ring->node + nodes - 1) % nodes}};
    for (int h = 0; h < nodes; h++) ring->hosts[h].said.kind = UNSAID;
    ring->hosts[ring->node].said = (struct statement){.kind = op->kind, .element = op->element, .count = op->count,
                                                      .reduction = op->reduction, .divisor = op->divisor,
                                                      .tag = op->tag};
    int result = pass_round(&p);
    atomic_store_explicit(&g->shared->members[g->me].awaits, 0, memory_order_relaxed);
    return result;
}
