/* The queue of operations. They run one after another, on the group's own thread or on a thread that waits.
 *
 * If a thread waits for an operation that has not started, this thread executes it and all operations before it.
 * So an operation whose caller waits for it directly is posted without waking the worker.
 */
#include "core.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct group *all_groups;
static pthread_mutex_t all_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Called, and returns, with the mutex held. */
static void perform(struct group *g, struct operation *op, int (*interrupted)(void)) {
    g->running = 1;
    int broken = g->failed_from != 0;
    pthread_mutex_unlock(&g->mutex);
    g->interrupted = interrupted;
    int failed = broken || execute(g, op);
    g->interrupted = NULL;
    pthread_mutex_lock(&g->mutex);
    if (failed && !g->failed_from) {
        g->failed_from = op->ticket;
        if (!g->failure[0]) describe_failure(g, op, g->failure, sizeof g->failure);
    }
    g->running = 0;
    g->done_ticket = op->ticket;
    pthread_cond_broadcast(&g->finished);
}

static void run_first(struct group *g, int (*interrupted)(void)) {
    struct operation *op = g->first;
    g->first = op->following;
    if (!g->first) g->last = NULL;
    perform(g, op, interrupted);
    free(op);
}

static void *work(void *argument) {
    struct group *g = argument;
    pthread_mutex_lock(&g->mutex);
    for (;;) {
        int due = g->first && g->first->ticket <= g->wanted_ticket;
        if (g->running) pthread_cond_wait(&g->finished, &g->mutex);
        else if (due) run_first(g, NULL);
        else if (g->stopping) break;
        else pthread_cond_wait(&g->posted, &g->mutex);
    }
    pthread_mutex_unlock(&g->mutex);
    return NULL;
}

/* The threads of Python handle signals; this thread does not. */
static int start_worker(struct group *g) {
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, &before);
    int error = pthread_create(&g->worker, NULL, work, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) pthread_setname_np(g->worker, "ddp-shm");
    return error;
}

int queue_start(struct group *g) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->posted, &monotonic);
    pthread_cond_init(&g->finished, &monotonic);
    int error = start_worker(g);
    g->has_worker = !error;
    return error;
}

static void wake_worker(struct group *g, uint64_t ticket) {
    if (ticket > g->wanted_ticket) g->wanted_ticket = ticket;
    pthread_cond_signal(&g->posted);
}

uint64_t queue_post(struct group *g, struct operation *op, int for_the_worker) {
    pthread_mutex_lock(&g->mutex);
    uint64_t ticket = op->ticket = ++g->posted_ticket;
    op->following = NULL;
    if (g->last) g->last->following = op;
    else g->first = op;
    g->last = op;
    if (for_the_worker) wake_worker(g, ticket);
    pthread_mutex_unlock(&g->mutex);
    return ticket;
}

static int outcome(struct group *g, uint64_t ticket) {
    if (g->failed_from && ticket >= g->failed_from) return FAILED;
    return ticket <= g->done_ticket ? DONE : NOT_YET;
}

/* Execute an operation without the queue, if the caller waits for it and no other operation is pending.
 * NOT_YET: another operation is pending, and nothing was done. */
int queue_run(struct group *g, struct operation *op, int (*interrupted)(void)) {
    int result = NOT_YET;
    pthread_mutex_lock(&g->mutex);
    if (!g->first && !g->running) {
        op->ticket = ++g->posted_ticket;
        perform(g, op, interrupted);
        result = outcome(g, op->ticket);
    }
    pthread_mutex_unlock(&g->mutex);
    return result;
}

void queue_want(struct group *g, uint64_t ticket) {
    pthread_mutex_lock(&g->mutex);
    wake_worker(g, ticket);
    pthread_mutex_unlock(&g->mutex);
}

int queue_done(struct group *g, uint64_t ticket) {
    pthread_mutex_lock(&g->mutex);
    int result = outcome(g, ticket);
    if (result == FAILED && ticket > g->done_ticket) result = NOT_YET;
    pthread_mutex_unlock(&g->mutex);
    return result;
}

static struct timespec instant(double at) {
    struct timespec t = {(time_t)at, 0};
    t.tv_nsec = (long)((at - (double)t.tv_sec) * 1e9);
    return t;
}

/* Wait for a short time, at most until `deadline`: long enough to be cheap, short enough to react to a signal. */
static int wait_a_little(struct group *g, double deadline, int (*interrupted)(void)) {
    double until = now() + 0.1;
    struct timespec t = instant(until < deadline ? until : deadline);
    if (!pthread_cond_timedwait(&g->finished, &g->mutex, &t)) return 0;
    if (now() >= deadline) return NOT_YET;
    if (!interrupted) return 0;
    pthread_mutex_unlock(&g->mutex);
    int stop = interrupted();
    pthread_mutex_lock(&g->mutex);
    return stop ? BROKEN_OFF : 0;
}

int queue_wait(struct group *g, uint64_t ticket, double timeout_s, int may_execute, int (*interrupted)(void)) {
    double deadline = now() + timeout_s;
    int result = 0;
    pthread_mutex_lock(&g->mutex);
    if (!may_execute && ticket > g->done_ticket) wake_worker(g, ticket);
    while (!result && ticket > g->done_ticket) {
        if (may_execute && !g->running) run_first(g, interrupted);
        else result = wait_a_little(g, deadline, interrupted);
    }
    if (!result) result = outcome(g, ticket);
    pthread_mutex_unlock(&g->mutex);
    return result;
}

/* Queued operations fail, and the running one is aborted. The thread has ended when this returns. */
void queue_stop(struct group *g) {
    pthread_mutex_lock(&g->mutex);
    int idle = !g->first && !g->running;
    g->stopping = 1;
    g->wanted_ticket = g->posted_ticket;
    if (!idle) fail(g, ABORTED, g->ranks[g->me]);
    pthread_cond_broadcast(&g->posted);
    pthread_cond_broadcast(&g->finished);
    pthread_mutex_unlock(&g->mutex);
    if (g->has_worker) pthread_join(g->worker, NULL);
    g->has_worker = 0;
    pthread_mutex_lock(&g->mutex);
    while (g->running) pthread_cond_wait(&g->finished, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

/* --- fork --------------------------------------------------------------------------------------------------------
 * A child inherits the sockets by which peers detect the end of its parent. So it closes them at once. */

static void before_fork(void) { pthread_mutex_lock(&all_mutex); }

static void after_fork(void) { pthread_mutex_unlock(&all_mutex); }

static void close_sockets(struct group *g) {
    for (int r = 0; r < g->size; r++)
        if (g->peers[r] >= 0) close(g->peers[r]);
    if (g->ring.next >= 0) close(g->ring.next);
    if (g->ring.previous >= 0 && g->ring.previous != g->ring.next) close(g->ring.previous);
    for (int r = 0; r < g->size; r++) g->peers[r] = -1;
    g->ring.next = g->ring.previous = -1;
}

static void in_the_child(void) {
    for (struct group *g = all_groups; g; g = g->next_group) {
        g->forked = 1;
        close_sockets(g);
    }
    all_groups = NULL;
    pthread_mutex_unlock(&all_mutex);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_the_child); }

void remember_group(struct group *g) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&all_mutex);
    g->next_group = all_groups;
    all_groups = g;
    pthread_mutex_unlock(&all_mutex);
}

void forget_group(struct group *g) {
    pthread_mutex_lock(&all_mutex);
    struct group **link = &all_groups;
    while (*link && *link != g) link = &(*link)->next_group;
    if (*link) *link = g->next_group;
    if (!g->forked) close_sockets(g);
    pthread_mutex_unlock(&all_mutex);
}
