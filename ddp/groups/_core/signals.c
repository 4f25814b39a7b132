/* A scheduler that takes a node away sends its signal to every process it finds, ranks included, and a rank would be
 * dead before it can save anything. A guarded rank heeds such a signal only from its parent, the launcher, which asks
 * for a checkpoint first. This must be C: a rank that waits inside a collective runs no Python, and who sent a signal
 * Python does not tell. */
#include "core.h"

#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t unheeded;
static volatile double unheeded_since;
static volatile double forgiven_at = -1e9;
static double patience_s;

static void heed(int number) {
    signal(number, SIG_DFL);
    raise(number); /* delivered when the handler returns */
}

static void on_signal(int number, siginfo_t *how, void *context) {
    (void)context;
    if (how->si_code <= 0 && how->si_pid == getppid()) heed(number);
    else if (now() - forgiven_at < patience_s) return; /* of the broadcast that was answered already */
    else if (!unheeded) unheeded_since = now(), unheeded = number;
    else if (now() - unheeded_since > patience_s) heed(number); /* somebody means it */
}

/* 0: this signal has a handler already, or is ignored, and stays as it is. */
int guard(int number, double patience) {
    struct sigaction before, ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    if (sigaction(number, NULL, &before) || before.sa_handler != SIG_DFL) return 0;
    patience_s = patience;
    sigemptyset(&ours.sa_mask);
    return !sigaction(number, &ours, NULL);
}

/* The signal that was not heeded, if that is longer ago than the patience; else 0. */
int overdue(void) { return unheeded && now() - unheeded_since > patience_s ? unheeded : 0; }

void forgive(void) { forgiven_at = now(), unheeded = 0; }
