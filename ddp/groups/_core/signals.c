/* A scheduler that stops a node sends a signal to all its processes, also to ranks. A rank would end before it can save
 * its state. A guarded rank ignores such a signal unless its parent, the launcher, sends it. The launcher requests a
 * checkpoint first. This must be C: a rank that waits in a collective does not run Python code, and Python does not
 * provide the sender of a signal. */
#include "core.h"

#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t ignored;
static volatile double ignored_since;
static volatile double answered_at = -1e9;
static double grace_s;

static void deliver(int number) {
    signal(number, SIG_DFL);
    raise(number); /* delivered when the handler returns */
}

static void on_signal(int number, siginfo_t *how, void *context) {
    (void)context;
    if (how->si_code <= 0 && how->si_pid == getppid()) deliver(number);
    else if (now() - answered_at < grace_s) return; /* it belongs to the signal that was already answered */
    else if (!ignored) ignored_since = now(), ignored = number;
    else if (now() - ignored_since > grace_s) deliver(number); /* the launcher did not react */
}

/* Return 0 if this signal already has a handler or is ignored. Then it is not changed. */
int guard(int number, double grace) {
    struct sigaction before, ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    if (sigaction(number, NULL, &before) || before.sa_handler != SIG_DFL) return 0;
    grace_s = grace;
    sigemptyset(&ours.sa_mask);
    return !sigaction(number, &ours, NULL);
}

/* Return the ignored signal if the grace period has passed, else 0. */
int overdue(void) { return ignored && now() - ignored_since > grace_s ? ignored : 0; }

void forget_ignored(void) { answered_at = now(), ignored = 0; }
