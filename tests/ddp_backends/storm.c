/* The core without Python, under a sanitizer: three processes, random operations, two threads that wait in each;
 * at last one leaves while the others are in a collective. Exits 0 when every sum was right. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MEMBERS = 3, ROUNDS = 400, STAGING = 1 << 14, LARGEST = 60000 };
static const size_t REGION = 1 << 22;

static struct group *group_of(int file, int me, int sockets[MEMBERS][MEMBERS]) {
    struct group *g = calloc(1, sizeof *g);
    g->size = g->leaders = MEMBERS;
    g->me = me;
    g->ring.next = g->ring.previous = -1;
    g->scratch = malloc(SMALL);
    for (int r = 0; r < MEMBERS; r++) {
        g->ranks[r] = r;
        g->peers[r] = r == me ? -1 : sockets[me][r];
    }
    if (segment_open(&g->segment, file, MEMBERS, me, STAGING, REGION) || queue_start(g)) exit(3);
    g->shared = (struct shared *)g->segment->base;
    remember_group(g);
    return g;
}

static uint64_t sum(struct group *g, float *data, size_t count, int pieces, int for_the_worker) {
    struct operation *op = calloc(1, sizeof *op + (size_t)pieces * sizeof(struct span));
    *op = (struct operation){.kind = ALL_REDUCE, .element = F32, .reduction = SUM, .count = count,
                             .divisor = 1, .timeout_s = 60};
    op->input.pieces = op->output.pieces = (struct span *)(op + 1);
    op->output.number = pieces;
    for (int p = 0; p < pieces; p++) {
        size_t begin = count * (size_t)p / (size_t)pieces, end = count * (size_t)(p + 1) / (size_t)pieces;
        op->output.pieces[p] = (struct span){(char *)(data + begin), begin * 4, (end - begin) * 4};
    }
    op->output.bytes = count * 4;
    return queue_post(g, op, for_the_worker);
}

struct waiter {
    struct group *group;
    uint64_t ticket;
    int result;
};

static void *wait_elsewhere(void *argument) {
    struct waiter *w = argument;
    w->result = queue_wait(w->group, w->ticket, 60, 0, NULL);
    return NULL;
}

static void one_round(struct group *g, int round) {
    size_t count = (size_t)(rand() % LARGEST);
    int pieces = 1 + rand() % 3, worker = rand() % 2;
    float *data[2] = {malloc(count * 4 + 4), (float *)segment_allocate(g->segment, count * 4)};
    if (round % 5 == g->me) {
        segment_free(g->segment, (char *)data[1]);
        data[1] = malloc(count * 4 + 4);
    }
    uint64_t tickets[2];
    for (int d = 0; d < 2; d++) {
        for (size_t i = 0; i < count; i++) data[d][i] = (float)(i % 7 + (size_t)g->me);
        tickets[d] = sum(g, data[d], count, d ? 1 : pieces, worker);
    }
    struct waiter other = {g, tickets[1], 0};
    pthread_t thread;
    pthread_create(&thread, NULL, wait_elsewhere, &other);
    int result = queue_wait(g, tickets[0], 60, 1, NULL);
    pthread_join(thread, NULL);
    if (result || other.result) exit(4);
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < count; i++)
            if (data[d][i] != (float)(MEMBERS * (i % 7) + 3)) exit(5);
    free(data[0]);
    if (round % 5 == g->me) free(data[1]);
    else segment_free(g->segment, (char *)data[1]);
}

static int member(int file, int me, int sockets[MEMBERS][MEMBERS]) {
    struct group *g = group_of(file, me, sockets);
    srand(1);
    for (int round = 0; round < ROUNDS; round++) one_round(g, round);
    if (me) {
        float data = 1;
        uint64_t ticket = sum(g, &data, 1, 1, me == 1);
        if (queue_wait(g, ticket, 60, 1, NULL) != FAILED || !strstr(g->failure, "rank 0 has left")) return 6;
    }
    queue_stop(g);
    atomic_store(&g->shared->members[me].left, 1);
    forget_group(g);
    segment_release(g->segment);
    free(g->scratch);
    free(g);
    return 0;
}

int main(void) {
    int sockets[MEMBERS][MEMBERS], failed = 0;
    int file = memfd_create("storm", MFD_CLOEXEC);
    if (ftruncate(file, (off_t)segment_length(MEMBERS, STAGING, REGION))) return 1;
    for (int a = 0; a < MEMBERS; a++)
        for (int b = a + 1; b < MEMBERS; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 1;
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    for (int me = 0; me < MEMBERS; me++) {
        if (fork()) continue;
        for (int a = 0; a < MEMBERS; a++)
            for (int b = 0; b < MEMBERS; b++)
                if (a != b && a != me) close(sockets[a][b]);
        exit(member(file, me, sockets));
    }
    for (int a = 0; a < MEMBERS; a++)
        for (int b = 0; b < MEMBERS; b++)
            if (a != b) close(sockets[a][b]);
    for (int me = 0, status; me < MEMBERS; me++) {
        wait(&status);
        if (status) printf("a member ended with status %x\n", status);
        failed |= status;
    }
    return failed != 0;
}
