/* The collectives, in terms of phases and turns; see core.h for why two staging buffers are enough. */
#include "core.h"

#include <stdio.h>
#include <string.h>

const char *const kind_names[KINDS] = {"barrier", "all-reduce", "broadcast", "all-gather", "reduce-scatter", "reduce"};

/* --- lists of tensors as one flat array -------------------------------------------------------------------------- */

static int piece_at(const struct spans *list, size_t offset) {
    int low = 0, high = list->number - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (list->pieces[middle].start <= offset) low = middle;
        else high = middle - 1;
    }
    return low;
}

static void copy(const struct spans *list, size_t offset, size_t bytes, char *flat, int out) {
    if (!bytes) return;
    for (int i = piece_at(list, offset); bytes; i++) {
        const struct span *piece = &list->pieces[i];
        size_t within = offset - piece->start, n = piece->bytes - within;
        if (n > bytes) n = bytes;
        if (out) memcpy(piece->at + within, flat, n);
        else memcpy(flat, piece->at + within, n);
        flat += n;
        offset += n;
        bytes -= n;
    }
}

static void copy_in(const struct spans *list, size_t offset, size_t bytes, char *flat) {
    copy(list, offset, bytes, flat, 0);
}

static void copy_out(const struct spans *list, size_t offset, size_t bytes, const char *flat) {
    copy(list, offset, bytes, (char *)flat, 1);
}

/* Return the address of this range if one tensor contains all of it, else NULL. */
static char *within_one(const struct spans *list, size_t offset, size_t bytes) {
    if (!bytes || !list->number) return NULL;
    const struct span *piece = &list->pieces[piece_at(list, offset)];
    return offset + bytes <= piece->start + piece->bytes ? piece->at + (offset - piece->start) : NULL;
}

/* --- the first phase of an operation ----------------------------------------------------------------------------- */

static const struct notice *notice_of(struct group *g, int member) {
    return &g->shared->members[member].notices[g->sequence & 1];
}

static void put_up(struct group *g, struct operation *op, uint64_t place) {
    g->shared->members[g->me].notices[++g->sequence & 1] = (struct notice){
        op->kind, op->element, op->reduction, (uint32_t)op->root, op->count, place, op->divisor, op->tag};
}

void describe_tag(uint64_t tag, char *text, size_t room) {
    if (tag)
        snprintf(text, room, "averaged bucket %u of step %u (wrapper and plan %06x)", TAG_BUCKET(tag), TAG_STEP(tag),
                 (unsigned)(tag >> 40));
    else
        snprintf(text, room, "averaged no bucket of DistributedDataParallel");
}

static void disagreement(struct group *g, int other) {
    const struct notice *a = notice_of(g, 0), *b = notice_of(g, other);
    char text[256], one[80], two[80];
    if (a->kind != b->kind || a->count != b->count || a->element != b->element)
        snprintf(text, sizeof text, "the ranks disagree: rank %d called %s of %llu x %s, rank %d %s of %llu x %s",
                 g->ranks[0], kind_names[a->kind], (unsigned long long)a->count, element_names[a->element],
                 g->ranks[other], kind_names[b->kind], (unsigned long long)b->count, element_names[b->element]);
    else if (a->tag != b->tag) {
        describe_tag(a->tag, one, sizeof one);
        describe_tag(b->tag, two, sizeof two);
        snprintf(text, sizeof text, "the ranks disagree: rank %d %s, rank %d %s", g->ranks[0], one, g->ranks[other], two);
    } else
        snprintf(text, sizeof text, "the ranks disagree: ranks %d and %d called %s with different %s", g->ranks[0],
                 g->ranks[other], kind_names[a->kind], a->root != b->root ? "roots" : "reductions");
    pthread_mutex_lock(&g->mutex);
    memcpy(g->failure, text, sizeof text);
    pthread_mutex_unlock(&g->mutex);
}

static int agreed(struct group *g) {
    const struct notice *a = notice_of(g, 0);
    for (int r = 1; r < g->size; r++) {
        const struct notice *b = notice_of(g, r);
        if (a->kind == b->kind && a->element == b->element && a->reduction == b->reduction && a->root == b->root &&
            a->count == b->count && a->divisor == b->divisor && a->tag == b->tag)
            continue;
        disagreement(g, r);
        return fail(g, MISMATCH, g->ranks[r]);
    }
    return 0;
}

static int phase(struct group *g, struct operation *op) {
    arrive(g);
    return await_phase(g, op);
}

/* The first phase of a turn. In the first turn of an operation, the members also compare their calls. */
static int turn_begins(struct group *g, struct operation *op, size_t done, uint64_t place) {
    if (!done) put_up(g, op, place);
    if (phase(g, op)) return -1;
    if (done || !agreed(g)) return 0;
    ring_refuse(g);
    return -1;
}

/* --- all-reduce ---------------------------------------------------------------------------------------------------- */

struct slice {
    size_t begin, bytes;
};

/* The slice of `count` elements that a leader reduces. Boundaries are aligned to cache lines. */
static struct slice slice_of(struct group *g, struct operation *op, size_t count, int leader) {
    size_t bytes = element_bytes[op->element], line = LINE / bytes, lines = (count + line - 1) / line;
    size_t begin = lines * (size_t)leader / (size_t)g->leaders * line;
    size_t end = lines * (size_t)(leader + 1) / (size_t)g->leaders * line;
    if (begin > count) begin = count;
    if (end > count) end = count;
    return (struct slice){begin * bytes, (end - begin) * bytes};
}

static int small_all_reduce(struct group *g, struct operation *op) {
    const char *from[MAX_MEMBERS];
    size_t bytes = op->output.bytes;
    copy_in(&op->output, 0, bytes, staging_of(g, g->me));
    if (turn_begins(g, op, 0, NOWHERE)) return -1;
    for (int r = 0; r < g->size; r++) from[r] = staging_of(g, r);
    char *direct = within_one(&op->output, 0, bytes), *to[1] = {direct ? direct : g->scratch};
    reduce(op->element, op->reduction, op->divisor, op->count, g->size, from, 1, to);
    if (!direct) copy_out(&op->output, 0, bytes, g->scratch);
    g->turn++;
    return 0;
}

/* Sum this leader's slice over the members of this host and then over the hosts, and write it to all of `to`. */
static int reduce_slice(struct group *g, struct operation *op, size_t bytes, const char *const *from, int targets,
                        char *const *to) {
    size_t count = bytes / element_bytes[op->element];
    /* If any leader has a slice, the last one has. Without a slice it still exchanges calls with the other hosts. */
    if (g->ring.nodes && !count && g->me != g->leaders - 1) return 0;
    if (!g->ring.nodes) {
        reduce(op->element, op->reduction, op->divisor, count, g->size, from, targets, to);
        return 0;
    }
    /* In half precision the sum over hosts may overflow where the average does not. */
    int half = op->element == F16 || op->element == BF16;
    double before = half ? op->divisor : 1, after = half ? 1 : op->divisor;
    if (g->size > 1 || from[0] != to[0]) reduce(op->element, op->reduction, before, count, g->size, from, 1, to);
    else divide(op->element, before, count, to[0]);
    if (ring_reduce(g, op, op->element, op->reduction, to[0], count)) return -1;
    divide(op->element, after, count, to[0]);
    for (int t = 1; t < targets; t++) memcpy(to[t], to[0], bytes);
    return 0;
}

/* The tensors of all members are in the shared file: each slice is read and its result is written there. The ring
 * uses the same portions for hosts on which this is not so. */
static int in_place(struct group *g, struct operation *op) {
    const char *from[MAX_MEMBERS];
    char *to[MAX_MEMBERS];
    size_t bytes = op->output.bytes, portion = g->ring.nodes ? g->segment->staging : bytes;
    for (size_t done = 0; g->me < g->leaders && done < bytes; done += portion) {
        size_t n = bytes - done < portion ? bytes - done : portion;
        struct slice mine = slice_of(g, op, n / element_bytes[op->element], g->me);
        for (int r = 0; r < g->size; r++)
            from[r] = g->segment->base + notice_of(g, r)->place + done + mine.begin;
        for (int r = 0; r < g->size; r++) to[r] = (char *)from[(g->me + r) % g->size];
        if (reduce_slice(g, op, mine.bytes, from, g->size, to)) return -1;
    }
    return phase(g, op);
}

/* The address of a member's part of this turn: its tensor in the shared file, or its staging buffer. */
static char *part_of(struct group *g, int member, size_t done, uint64_t mine) {
    uint64_t place = member == g->me ? mine : notice_of(g, member)->place;
    return place == NOWHERE ? staging_of(g, member) : g->segment->base + place + done;
}

static char *own_slice(struct group *g, struct operation *op, size_t done, struct slice mine) {
    return g->me < g->leaders ? within_one(&op->output, done + mine.begin, mine.bytes) : NULL;
}

static void stage(struct group *g, struct operation *op, size_t done, size_t count, char *own) {
    for (int c = 0; c < g->leaders; c++) {
        struct slice s = slice_of(g, op, count, c);
        if (c != g->me || !own) copy_in(&op->output, done + s.begin, s.bytes, staging_of(g, g->me) + s.begin);
    }
}

/* A host with one rank does not use staging buffers: the ring sends contiguous data directly from the tensor. */
static int lonely_turn(struct group *g, struct operation *op, size_t count, char *own) {
    char *to[1] = {own};
    const char *from[1] = {own};
    return reduce_slice(g, op, count * element_bytes[op->element], from, 1, to);
}

static int staged_turn(struct group *g, struct operation *op, size_t done, size_t count, uint64_t place, char *own) {
    const char *from[MAX_MEMBERS];
    struct slice mine = slice_of(g, op, count, g->me);
    if (g->me < g->leaders) {
        for (int r = 0; r < g->size; r++) from[r] = part_of(g, r, done, place) + mine.begin;
        char *to[2] = {(char *)from[g->me], own};
        if (own) from[g->me] = own;
        int targets = own && own != to[0] ? 2 : 1;
        if (reduce_slice(g, op, mine.bytes, from, targets, to)) return -1;
    }
    if (phase(g, op)) return -1;
    for (int c = 0; c < g->leaders; c++) {
        struct slice s = slice_of(g, op, count, c);
        if (c == g->me && (own || place != NOWHERE)) continue;
        copy_out(&op->output, done + s.begin, s.bytes, part_of(g, c, done, place) + s.begin);
    }
    g->turn++;
    return 0;
}

static int all_reduce(struct group *g, struct operation *op) {
    size_t bytes = op->output.bytes, one = element_bytes[op->element], room = g->segment->staging;
    if (bytes <= SMALL && !g->ring.nodes) return small_all_reduce(g, op);
    char *whole = within_one(&op->output, 0, bytes);
    uint64_t place = whole ? place_of(g->segment, whole, bytes) : NOWHERE;
    size_t done = 0;
    int outside = 0;
    do {
        size_t n = bytes - done < room ? bytes - done : room;
        char *own = place == NOWHERE ? own_slice(g, op, done, slice_of(g, op, n / one, g->me)) : NULL;
        int lonely = g->size == 1 && own;
        if (place == NOWHERE && !lonely) stage(g, op, done, n / one, own);
        if (turn_begins(g, op, done, place)) return -1;
        for (int r = 0; !done && r < g->size; r++) outside += notice_of(g, r)->place == NOWHERE;
        if (!outside) return in_place(g, op);
        if (lonely ? lonely_turn(g, op, n / one, own) : staged_turn(g, op, done, n / one, place, own)) return -1;
        done += n;
    } while (done < bytes);
    /* If peers read a member's own memory, that member must not return before all have read it. */
    return outside < g->size ? phase(g, op) : 0;
}

/* --- other collectives: one phase per turn ----------------------------------------------------------------------- */

static int barrier(struct group *g, struct operation *op) {
    if (turn_begins(g, op, 0, NOWHERE)) return -1;
    if (!g->ring.nodes) return 0;
    char nothing = 0;
    if (g->me == g->leaders - 1 && ring_reduce(g, op, U8, MAXIMUM, &nothing, 0)) return -1;
    return phase(g, op);
}

static int broadcast(struct group *g, struct operation *op) {
    size_t bytes = op->output.bytes, room = g->segment->staging, done = 0;
    do {
        size_t n = bytes - done < room ? bytes - done : room;
        if (g->me == op->root) copy_in(&op->output, done, n, staging_of(g, g->me));
        if (turn_begins(g, op, done, NOWHERE)) return -1;
        if (g->me != op->root) copy_out(&op->output, done, n, staging_of(g, op->root));
        g->turn++;
        done += n;
    } while (done < bytes);
    return 0;
}

static int all_gather(struct group *g, struct operation *op) {
    size_t bytes = op->input.bytes, room = g->segment->staging, done = 0;
    do {
        size_t n = bytes - done < room ? bytes - done : room;
        copy_in(&op->input, done, n, staging_of(g, g->me));
        if (turn_begins(g, op, done, NOWHERE)) return -1;
        for (int r = 0; r < g->size; r++)
            copy_out(&op->output, (size_t)r * bytes + done, n, staging_of(g, r));
        g->turn++;
        done += n;
    } while (done < bytes);
    return 0;
}

/* Reduce the data at `begin` of all staging buffers into the output, from `done` on. */
static void reduce_out(struct group *g, struct operation *op, size_t done, size_t bytes, size_t begin) {
    const char *from[MAX_MEMBERS];
    for (int r = 0; r < g->size; r++) from[r] = staging_of(g, r) + begin;
    char *direct = within_one(&op->output, done, bytes), *to[1] = {direct};
    /* A part of this member's staging buffer that no other member reads is used as scratch memory. */
    if (!direct) to[0] = staging_of(g, g->me) + begin;
    reduce(op->element, op->reduction, op->divisor, bytes / element_bytes[op->element], g->size, from, 1, to);
    if (!direct) copy_out(&op->output, done, bytes, to[0]);
}

static int reduce_scatter(struct group *g, struct operation *op) {
    size_t bytes = op->output.bytes, done = 0, share = g->segment->staging / (size_t)g->size / LINE * LINE;
    do {
        size_t n = bytes - done < share ? bytes - done : share;
        for (int r = 0; r < g->size; r++)
            copy_in(&op->input, (size_t)r * bytes + done, n, staging_of(g, g->me) + (size_t)r * share);
        if (turn_begins(g, op, done, NOWHERE)) return -1;
        reduce_out(g, op, done, n, (size_t)g->me * share);
        g->turn++;
        done += n;
    } while (done < bytes);
    return 0;
}

static int reduce_to_root(struct group *g, struct operation *op) {
    size_t bytes = op->output.bytes, room = g->segment->staging, done = 0;
    do {
        size_t n = bytes - done < room ? bytes - done : room;
        copy_in(&op->output, done, n, staging_of(g, g->me));
        if (turn_begins(g, op, done, NOWHERE)) return -1;
        if (g->me == op->root) reduce_out(g, op, done, n, 0);
        g->turn++;
        done += n;
    } while (done < bytes);
    return 0;
}

int execute(struct group *g, struct operation *op) {
    static int (*const routines[KINDS])(struct group *, struct operation *) = {
        barrier, all_reduce, broadcast, all_gather, reduce_scatter, reduce_to_root};
    op->deadline = now() + op->timeout_s;
    if (look_around(g, op, 0)) return -1;
    return routines[op->kind](g, op);
}
