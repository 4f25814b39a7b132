/* All-reduce among hosts: each carrier passes data round a ring of TCP connections.
 *
 * The array is cut into as many blocks as there are hosts. In the first half of the way a block gathers a sum as it
 * goes round; in the second the sums go round. What is sent in step s+1 is what was received in step s, so the steps
 * need no border between them: a byte may leave as soon as it has been received and added. Each block's sum is
 * formed once, at one host, and then copied: results are the same bits everywhere.
 */
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

enum { LOOK_EVERY_MS = 20 };

/* One direction's way through the steps. */
struct journey {
    int step, block;
    size_t within, total;
};

struct passage {
    struct group *group;
    struct operation *operation;
    enum element element;
    enum reduction reduction;
    char *data;
    size_t count, held; /* held: bytes of an element that has not come in whole */
    struct journey out, in;
};

static size_t block_begin(const struct passage *p, int block) {
    size_t nodes = (size_t)p->group->ring.nodes, whole = p->count / nodes, rest = p->count % nodes, b = (size_t)block;
    return (b * whole + (b < rest ? b : rest)) * element_bytes[p->element];
}

static size_t block_bytes(const struct passage *p, int block) {
    return block_begin(p, block + 1) - block_begin(p, block);
}

static int steps(const struct passage *p) { return 2 * (p->group->ring.nodes - 1); }

static void advance(const struct passage *p, struct journey *j, size_t bytes) {
    int nodes = p->group->ring.nodes;
    j->within += bytes;
    j->total += bytes;
    while (j->step < steps(p) && j->within == block_bytes(p, j->block)) {
        j->step++;
        j->within = 0;
        j->block = (j->block + nodes - 1) % nodes;
    }
}

/* Without waiting: 1 moved, 0 would block, -1 the connection is gone. */
static int send_some(struct passage *p) {
    struct ring *ring = &p->group->ring;
    size_t first = block_bytes(p, ring->node), allowed = first + p->in.total - p->out.total;
    size_t left = block_bytes(p, p->out.block) - p->out.within, bytes = left < allowed ? left : allowed;
    if (!bytes) return 0;
    ssize_t sent = send(ring->next, p->data + block_begin(p, p->out.block) + p->out.within, bytes,
                        MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    advance(p, &p->out, (size_t)sent);
    return 1;
}

static int add_some(struct passage *p, size_t bytes) {
    size_t one = element_bytes[p->element], whole = (p->held + bytes) / one * one;
    char *scratch = p->group->ring.scratch, *mine = p->data + block_begin(p, p->in.block) + p->in.within;
    const char *from[2] = {scratch, mine};
    reduce(p->element, p->reduction, 1, whole / one, 2, from, 1, &mine);
    p->held = p->held + bytes - whole;
    memmove(scratch, scratch + whole, p->held);
    advance(p, &p->in, whole);
    return 1;
}

static int receive_some(struct passage *p) {
    struct ring *ring = &p->group->ring;
    int adding = p->in.step < ring->nodes - 1;
    size_t left = block_bytes(p, p->in.block) - p->in.within - p->held;
    size_t room = adding ? RING_SCRATCH - p->held : left, bytes = left < room ? left : room;
    char *to = adding ? ring->scratch + p->held : p->data + block_begin(p, p->in.block) + p->in.within;
    ssize_t got = recv(ring->previous, to, bytes, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    if (!got) return -1;
    if (adding) return add_some(p, (size_t)got);
    advance(p, &p->in, (size_t)got);
    return 1;
}

static int rest(struct passage *p) {
    struct ring *ring = &p->group->ring;
    int can_send = p->out.step < steps(p) && block_bytes(p, ring->node) + p->in.total > p->out.total;
    struct pollfd sockets[2] = {{ring->previous, POLLIN, 0}, {can_send ? ring->next : -1, POLLOUT, 0}};
    if (p->in.step == steps(p)) sockets[0].fd = -1;
    int stirred = poll(sockets, 2, LOOK_EVERY_MS) > 0;
    return look_around(p->group, p->operation, stirred ? 0 : ON_THE_RING);
}

static int lost(struct passage *p, int rank) { return fail(p->group, LINK_LOST, rank); }

int ring_reduce(struct group *g, struct operation *op, enum element element, enum reduction reduction, char *data,
                size_t count) {
    struct ring *ring = &g->ring;
    int nodes = ring->nodes;
    struct passage p = {g, op, element, reduction, data, count, 0, {0, ring->node, 0, 0}, {0, 0, 0, 0}};
    p.in.block = (ring->node + nodes - 1) % nodes;
    advance(&p, &p.out, 0);
    advance(&p, &p.in, 0);
    while (p.out.step < steps(&p) || p.in.step < steps(&p)) {
        int sent = p.out.step < steps(&p) ? send_some(&p) : 0;
        int received = p.in.step < steps(&p) ? receive_some(&p) : 0;
        if (sent < 0) return lost(&p, ring->next_rank);
        if (received < 0) return lost(&p, ring->previous_rank);
        if (!sent && !received && rest(&p)) return -1;
    }
    return 0;
}
