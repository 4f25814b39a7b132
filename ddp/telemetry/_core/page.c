/* The writer of a rank's status page. page_layout.h is its layout; docs/status-page.md says what it means.
 *
 * Every block begins with a counter. The writer makes it odd, changes the block and makes it even again. A reader uses
 * its copy of a block only if the counter was even before and has the same value after. The fences keep this order on
 * any CPU. A write makes no system call: the clock is read through the vDSO, the page is memory. The GIL serializes the
 * threads of the writer. A forked child inherits the page, but it is not the rank, so it writes nothing.
 *
 * Each thread has a phase of its own, so phases of threads nest independently. The page shows the phase of one thread:
 * the one that trains. That is the thread that opened the page, until another one takes the first backward pass or
 * optimizer step. If several threads train, it is the thread that opened the page, or the first one of the others.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "page_layout.h"

enum { TICKET_GROUP = 1, TICKET_NUMBER = 13 }; /* places in a ticket, after the bit of a PAIR: 12 bits for the group */

/* All facts of a group, kept in case another group overwrites its slot on the page. */
struct known {
    uint32_t size;
    uint64_t entered, finished;
    char name[40], members[24];
};

typedef struct {
    PyObject_HEAD
    struct page *page;
    uint64_t entered;      /* collectives, in all groups */
    uint64_t steps_offset; /* the script's own count of steps, less ours */
    uint64_t repeats_until; /* by our count; 0: the process has not been paused, and the agent's numbers count */
    int moved, ever_moved; /* part of a step has run: since the last step ended, ever */
    int evaluating;        /* gradients are off: what would be part of a step is part of an evaluation */
    uint32_t open;         /* asynchronous collectives of the ring that have not ended */
    uint64_t open_after;   /* of those with a greater number: the ones before are forgotten */
    uint64_t hidden_since; /* until then, hidden communication is counted */
    uint32_t last;         /* the last phase that was neither IDLE nor COMMUNICATE */
    uint32_t known_groups;
    struct known *known;
} Page;

static int this_process_writes;

/* --- threads: a number is never used again, unlike the thread ids of the system ------------------------------------- */

static _Thread_local struct {
    uint64_t number;
    uint64_t saves_step; /* finished steps when its checkpoint began */
    uint32_t phase;
    int trains; /* it has begun a backward pass */
} mine;
static uint64_t threads, opener; /* how many threads have numbers; the one that opened the page */
static _Atomic uint64_t shown;   /* the one whose phase the page shows; 0: it has ended */
static int shown_trains;
static pthread_key_t at_thread_end;

static void thread_ended(void *number) { /* without the GIL */
    uint64_t ended = (uint64_t)(uintptr_t)number;
    atomic_compare_exchange_strong(&shown, &ended, 0);
}

static void meet_thread(void) {
    if (mine.number) return;
    mine.number = ++threads;
    mine.phase = IDLE;
    pthread_setspecific(at_thread_end, (void *)(uintptr_t)mine.number);
}

static int is_shown(void) {
    return atomic_load_explicit(&shown, memory_order_relaxed) == mine.number;
}

static void in_forked_child(void) {
    this_process_writes = 0;
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static void begin(counter *sequence) {
    uint64_t odd = atomic_load_explicit(sequence, memory_order_relaxed) | 1; /* an earlier writer may have died here */
    atomic_store_explicit(sequence, odd, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

static void end(counter *sequence) {
    uint64_t even = atomic_load_explicit(sequence, memory_order_relaxed) + 1;
    atomic_store_explicit(sequence, even, memory_order_release);
}

/* Store text as UTF-8, truncated at a character boundary, padded with zeros. */
static int put_text(char *to, size_t room, PyObject *text) {
    Py_ssize_t length;
    const char *from = PyUnicode_AsUTF8AndSize(text, &length);
    if (!from) return -1;
    size_t used = (size_t)length;
    if (used > room) {
        used = room;
        while (used && ((unsigned char)from[used] & 0xc0) == 0x80) used--;
    }
    memcpy(to, from, used);
    memset(to + used, 0, room - used);
    return 0;
}

static struct page *page_of(PyObject *self) {
    if (!this_process_writes) return NULL;
    meet_thread();
    return ((Page *)self)->page;
}

static int has_wrong_count(Py_ssize_t given, Py_ssize_t wanted, const char *what) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, got %zd", what, wanted, given);
    return 1;
}

/* --- phases and steps ----------------------------------------------------------------------------------------------- */

static int is_training(uint32_t phase) { /* a part of a training step, or between two such parts */
    return (phase >= DATA && phase <= OPTIMIZER) || phase == IDLE;
}

/* Until the first part of a step, the script still starts. */
static uint32_t account_of(const Page *self, uint32_t phase) {
    if (self->evaluating && is_training(phase)) return EVALUATION;
    return self->last == STARTING && (phase == IDLE || phase == COMMUNICATE) ? STARTING : phase;
}

/* The code before a backward pass is the forward pass, also of a model that is not wrapped, and the loss. */
static uint32_t final_account(const Page *self, uint32_t account, uint32_t next) {
    int in_a_step = self->last == DATA || self->last == FORWARD || self->last == BACKWARD || self->last == OPTIMIZER;
    return account == IDLE && next == BACKWARD && in_a_step ? FORWARD : account;
}

static void note_checkpoint(struct page *page, uint64_t step) {
    struct totals *t = &page->totals;
    begin(&t->sequence);
    t->checkpoint_step = step;
    t->checkpoints++;
    end(&t->sequence);
}

/* Call this before what decides about it changes: the account of the time, and the collectives that run. Several that
 * run at the same time count once. */
static void count_hidden(Page *self, uint64_t now) {
    struct totals *t = &self->page->totals;
    const struct progress *p = &self->page->progress;
    if (self->open && p->phase != COMMUNICATE && p->account != COMMUNICATE) {
        begin(&t->sequence);
        t->hidden_ns += now - self->hidden_since;
        end(&t->sequence);
    }
    self->hidden_since = now;
}

static int is_open(const Page *self, const struct collective *slot) {
    return slot->number > self->open_after && slot->flags & ASYNC && !slot->finished_at;
}

static void clear(counter *sequence, size_t size) {
    begin(sequence);
    memset((char *)sequence + sizeof *sequence, 0, size - sizeof *sequence);
    end(sequence);
}

/* Whether the page shows this thread from now on, because it enters this phase. */
static int shows(struct page *page, uint32_t phase) {
    int part_of_training = phase == BACKWARD || phase == OPTIMIZER;
    uint64_t other = atomic_load_explicit(&shown, memory_order_relaxed);
    if (other != mine.number) {
        int is_free = !other || phase == EXITING || (part_of_training && !shown_trains);
        if (!(mine.number == opener ? is_free || part_of_training : is_free && part_of_training)) return 0;
        if (page->section.since) clear(&page->section.sequence, sizeof page->section); /* of the other thread */
        atomic_store_explicit(&shown, mine.number, memory_order_relaxed);
        shown_trains = 0;
    }
    shown_trains |= part_of_training;
    return 1;
}

static void show_phase(Page *self, struct progress *p, uint32_t phase) {
    uint64_t now = now_ns();
    if (phase == BACKWARD || phase == OPTIMIZER) self->evaluating = 0;
    count_hidden(self, now);
    begin(&p->sequence);
    p->phase_ns[final_account(self, p->account, phase)] += now - p->phase_since;
    if (phase != IDLE && phase != COMMUNICATE) self->last = phase;
    p->phase = phase;
    p->account = account_of(self, phase);
    p->phase_since = now;
    end(&p->sequence);
    if (phase >= DATA && phase <= COMMUNICATE) self->moved = self->ever_moved = 1;
}

static uint32_t enter_phase(Page *self, struct page *page, uint32_t phase) {
    uint32_t before = mine.phase;
    mine.phase = phase;
    if (phase == BACKWARD) mine.trains = 1;
    if (phase == CHECKPOINT && before != CHECKPOINT) mine.saves_step = page->progress.step;
    if (shows(page, phase)) show_phase(self, &page->progress, phase);
    if (before == CHECKPOINT && phase != CHECKPOINT) note_checkpoint(page, mine.saves_step);
    return before;
}

/* Without gradients, nothing is a part of a training step. The phase does not change, only what its time counts as. */
static PyObject *page_evaluates(PyObject *self, PyObject *yes) {
    struct page *page = page_of(self);
    Page *own = (Page *)self;
    int evaluates = PyObject_IsTrue(yes);
    if (evaluates < 0) return NULL;
    if (page && is_shown() && own->evaluating != evaluates) {
        struct progress *p = &page->progress;
        uint64_t now = now_ns();
        own->evaluating = evaluates;
        count_hidden(own, now);
        begin(&p->sequence);
        p->phase_ns[p->account] += now - p->phase_since;
        p->account = account_of(own, p->phase);
        p->phase_since = now;
        end(&p->sequence);
    }
    Py_RETURN_NONE;
}

/* The interpreter keeps the exception that nothing has caught, and then exits. */
static void note_uncaught(struct totals *t) {
    if (!PySys_GetObject("last_type")) return;
    begin(&t->sequence);
    t->flags |= UNCAUGHT;
    end(&t->sequence);
}

static PyObject *page_phase(PyObject *self, PyObject *wanted) {
    struct page *page = page_of(self);
    unsigned long phase = PyLong_AsUnsignedLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (phase > EXITING) return PyErr_Format(PyExc_ValueError, "invalid phase %lu: not a number from 0 to %d", phase, EXITING);
    if (!page) return PyLong_FromLong(STARTING);
    if (phase == EXITING) note_uncaught(&page->totals);
    return PyLong_FromLong((long)enter_phase((Page *)self, page, (uint32_t)phase));
}

/* A phase that the script has named lasts until the script ends it. Communication before the first step belongs to the
 * start of the script. */
static int is_named(uint32_t phase) {
    return phase >= CHECKPOINT && phase <= SECTION;
}

static PyObject *page_mark(PyObject *self, PyObject *wanted) {
    struct page *page = page_of(self);
    unsigned long phase = PyLong_AsUnsignedLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (phase > EXITING) return PyErr_Format(PyExc_ValueError, "invalid phase %lu: not a number from 0 to %d", phase, EXITING);
    if (!page) return PyLong_FromLong(STARTING);
    uint32_t now = mine.phase;
    if (now != phase && !is_named(now) && !(now == STARTING && phase == COMMUNICATE))
        enter_phase((Page *)self, page, (uint32_t)phase);
    return PyLong_FromLong((long)now);
}

static PyObject *page_back(PyObject *self, PyObject *before) {
    struct page *page = page_of(self);
    unsigned long phase = PyLong_AsUnsignedLong(before);
    if (PyErr_Occurred()) return NULL;
    if (page && phase <= EXITING) {
        uint32_t now = mine.phase;
        if (phase == STARTING && now != STARTING) phase = IDLE;
        if (now != phase && !is_named(now)) enter_phase((Page *)self, page, (uint32_t)phase);
    }
    Py_RETURN_NONE;
}

/* The bins of a histogram: up to 15.625 us, then twice as much each time, the last one without a limit. */
static int bin_of(uint64_t took_ns) {
    int bin = 0;
    for (uint64_t edge = 15625; bin < BINS - 1 && took_ns > edge; edge <<= 1) bin++;
    return bin;
}

/* The steps that ranks before this one had finished, and that were lost with them, are finished again. */
static int has_repeated(const Page *own) {
    const struct header *h = &own->page->header;
    uint64_t step = own->page->progress.step;
    if (own->repeats_until) return step - own->steps_offset >= own->repeats_until;
    if (own->page->totals.flags & NUMBERED && h->repeat_to) return step >= h->repeat_to;
    /* A script that numbers its steps does so after its first step: until then, it may be at any of them. */
    uint64_t most = h->repeat_to > h->repeat_steps ? h->repeat_to : h->repeat_steps;
    return step - own->steps_offset >= most;
}

static void end_repeating(struct page *page, uint64_t now) {
    struct progress *p = &page->progress;
    struct totals *t = &page->totals;
    t->flags &= ~(uint32_t)REPEATS;
    for (uint32_t phase = 0; phase < PHASES; phase++)
        t->repeated_ns[phase] = is_training(phase) ? p->phase_ns[phase] : 0;
    if (is_training(p->account)) t->repeated_ns[p->account] += now - p->phase_since;
}

/* The rest of this backward pass waits for collectives. The phase stays: what a rank does is not told by its waiting. */
static PyObject *page_awaits(PyObject *self, PyObject *none) {
    (void)none;
    struct page *page = page_of(self);
    if (page && page->progress.phase == BACKWARD && page->progress.account == BACKWARD) {
        struct progress *p = &page->progress;
        uint64_t now = now_ns();
        count_hidden((Page *)self, now);
        begin(&p->sequence);
        p->phase_ns[BACKWARD] += now - p->phase_since;
        p->account = COMMUNICATE;
        p->phase_since = now;
        end(&p->sequence);
    }
    Py_RETURN_NONE;
}

static PyObject *page_step(PyObject *self, PyObject *none) {
    (void)none;
    struct page *page = page_of(self);
    Page *own = (Page *)self;
    if (!page || (own->ever_moved && !own->moved)) Py_RETURN_NONE; /* a second optimizer in the same step */
    if (!is_shown() && mine.trains) Py_RETURN_NONE; /* it trains another model, beside the one that is shown */
    struct progress *p = &page->progress;
    struct totals *t = &page->totals;
    uint64_t now = now_ns(), took = now - p->step_since;
    uint64_t mean = p->mean_step_ns;
    own->moved = 0;
    begin(&p->sequence);
    p->step++;
    p->step_since = now;
    p->last_step_ns = took;
    int is_first = p->step - own->steps_offset == 1;
    if (!is_first) p->mean_step_ns = mean ? mean + (took >> 3) - (mean >> 3) : took;
    end(&p->sequence);
    begin(&t->sequence);
    if (is_first) {
        t->first_step_at = now;
    } else {
        t->steps[bin_of(took)]++;
        t->step_sum_ns += took;
    }
    if (t->flags & REPEATS && has_repeated(own)) end_repeating(page, now);
    end(&t->sequence);
    Py_RETURN_NONE;
}

static PyObject *page_number(PyObject *self, PyObject *wanted) {
    struct page *page = page_of(self);
    unsigned long long number = PyLong_AsUnsignedLongLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (page) {
        struct progress *p = &page->progress;
        struct totals *t = &page->totals;
        begin(&p->sequence);
        ((Page *)self)->steps_offset += number - p->step;
        p->step = number;
        end(&p->sequence);
        begin(&t->sequence);
        t->flags |= NUMBERED;
        if (t->flags & REPEATS && has_repeated((Page *)self)) end_repeating(page, now_ns());
        end(&t->sequence);
    }
    Py_RETURN_NONE;
}

/* This process goes on in another generation: it takes so many steps again. */
static PyObject *page_repeats(PyObject *self, PyObject *wanted) {
    struct page *page = page_of(self);
    unsigned long long steps = PyLong_AsUnsignedLongLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (page) {
        Page *own = (Page *)self;
        own->repeats_until = page->progress.step - own->steps_offset + steps;
        begin(&page->totals.sequence);
        page->totals.flags |= REPEATS;
        end(&page->totals.sequence);
    }
    Py_RETURN_NONE;
}

static PyObject *page_total(PyObject *self, PyObject *wanted) {
    struct page *page = page_of(self);
    unsigned long long steps = PyLong_AsUnsignedLongLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (page) {
        begin(&page->totals.sequence);
        page->totals.total_steps = steps;
        end(&page->totals.sequence);
    }
    Py_RETURN_NONE;
}

/* --- buckets -------------------------------------------------------------------------------------------------------- */

static PyObject *page_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (has_wrong_count(n, 3, "buckets")) return NULL;
    unsigned long of = PyLong_AsUnsignedLong(args[0]);
    unsigned long launched = PyLong_AsUnsignedLong(args[1]);
    unsigned long finished = PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    struct page *page = page_of(self);
    if (page) {
        struct progress *p = &page->progress;
        uint64_t now = now_ns();
        begin(&p->sequence);
        if (launched != p->launched) p->launched_at = now;
        if (finished != p->finished) p->finished_at = now;
        p->buckets = (uint32_t)of;
        p->launched = (uint32_t)launched;
        p->finished = (uint32_t)finished;
        end(&p->sequence);
    }
    Py_RETURN_NONE;
}

/* Keep the longest timeout of all groups. */
static PyObject *page_group_timeout(PyObject *self, PyObject *timeout) {
    struct page *page = page_of(self);
    double timeout_s = PyFloat_AsDouble(timeout);
    if (PyErr_Occurred()) return NULL;
    uint64_t longest = timeout_s > 0 ? (uint64_t)(timeout_s < 1e9 ? timeout_s * 1e9 : 1e18) : 0;
    if (page && longest > page->progress.group_timeout_ns) {
        begin(&page->progress.sequence);
        page->progress.group_timeout_ns = longest;
        end(&page->progress.sequence);
    }
    Py_RETURN_NONE;
}

/* --- groups and collectives ----------------------------------------------------------------------------------------- */

static PyObject *page_group(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Page *own = (Page *)self;
    if (has_wrong_count(n, 3, "group")) return NULL;
    if (own->known_groups == KNOWN_GROUPS) return PyLong_FromLong(KNOWN_GROUPS); /* enter() does not record it */
    struct known *known = &own->known[own->known_groups];
    memset(known, 0, sizeof *known);
    if (put_text(known->name, sizeof known->name, args[0])) return NULL;
    known->size = (uint32_t)PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t length;
    if (!PyUnicode_AsUTF8AndSize(args[2], &length)) return NULL;
    if ((size_t)length <= sizeof known->members && put_text(known->members, sizeof known->members, args[2]))
        return NULL;
    return PyLong_FromUnsignedLong(own->known_groups++);
}

static void show_group(struct page *page, uint32_t number, const struct known *known) {
    struct group *slot = &page->groups[number % GROUPS];
    begin(&slot->sequence);
    if (slot->group != number + 1) {
        slot->group = number + 1; /* 0 means that the slot is empty */
        slot->size = known->size;
        memcpy(slot->name, known->name, sizeof slot->name);
        memcpy(slot->members, known->members, sizeof slot->members);
    }
    slot->entered = known->entered;
    slot->finished = known->finished;
    end(&slot->sequence);
}

/* enter(group, op, dtype, numel, shape, peer, is_async, sequence): sequence 0 takes the group's next number. */
static PyObject *page_enter(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Page *own = (Page *)self;
    if (has_wrong_count(n, 8, "enter")) return NULL;
    struct page *page = page_of(self);
    unsigned long group = PyLong_AsUnsignedLong(args[0]);
    unsigned long long numel = PyLong_AsUnsignedLongLong(args[3]);
    unsigned long shape = PyLong_AsUnsignedLong(args[4]);
    long peer = PyLong_AsLong(args[5]);
    long is_async = PyLong_AsLong(args[6]);
    unsigned long long sequence = PyLong_AsUnsignedLongLong(args[7]);
    if (PyErr_Occurred()) return NULL;
    if (group == KNOWN_GROUPS) return PyLong_FromLong(0);
    if (group >= own->known_groups) return PyErr_Format(PyExc_ValueError, "invalid group %lu: not a number that group() returned", group);
    if (!page) return PyLong_FromLong(0);
    struct known *known = &own->known[group];
    uint64_t number = ++own->entered;
    if (is_shown()) own->moved = own->ever_moved = 1;
    uint32_t flags = (is_async ? ASYNC : 0u) | (sequence ? PAIR : 0u);
    if (!sequence) sequence = ++known->entered;
    show_group(page, (uint32_t)group, known);
    struct collective *slot = &page->ring[number % RING];
    uint64_t now = now_ns();
    count_hidden(own, now);
    if (is_open(own, slot)) own->open--; /* it leaves the ring */
    if (is_async) own->open++;
    begin(&slot->sequence);
    slot->number = number;
    slot->group_sequence = sequence;
    slot->entered_at = now;
    slot->finished_at = 0;
    slot->numel = numel;
    slot->shape = (uint32_t)shape;
    slot->group = (uint32_t)group + 1;
    slot->peer = (int32_t)peer;
    slot->flags = flags;
    int failed = put_text(slot->op, sizeof slot->op, args[1]) || put_text(slot->dtype, sizeof slot->dtype, args[2]);
    end(&slot->sequence);
    uint64_t ticket = number << TICKET_NUMBER | (uint64_t)group << TICKET_GROUP | (flags & PAIR ? 1 : 0);
    return failed ? NULL : PyLong_FromUnsignedLongLong(ticket);
}

static PyObject *page_leave(PyObject *self, PyObject *ticket) {
    struct page *page = page_of(self);
    Page *own = (Page *)self;
    uint64_t given = PyLong_AsUnsignedLongLong(ticket), number = given >> TICKET_NUMBER;
    if (PyErr_Occurred()) return NULL;
    if (!page || !number) Py_RETURN_NONE;
    struct collective *slot = &page->ring[number % RING];
    int has_left_ring = slot->number != number;
    if (!has_left_ring && slot->finished_at) Py_RETURN_NONE;
    if (!has_left_ring) {
        struct totals *t = &page->totals;
        uint64_t now = now_ns(), took = now - slot->entered_at;
        count_hidden(own, now);
        if (is_open(own, slot)) own->open--;
        begin(&slot->sequence);
        slot->finished_at = now;
        end(&slot->sequence);
        begin(&t->sequence);
        if (!t->formed_at) t->formed_at = now; /* the first call forms the first group */
        t->calls[bin_of(took)]++;
        t->call_sum_ns += took;
        end(&t->sequence);
    }
    uint32_t group = (uint32_t)(given >> TICKET_GROUP) & (KNOWN_GROUPS - 1);
    if (!(given & 1)) {
        own->known[group].finished++;
        show_group(page, group, &own->known[group]);
    }
    if (mine.phase == STARTING) enter_phase(own, page, IDLE);
    Py_RETURN_NONE;
}

/* The groups before this are gone, and so are their collectives. */
static PyObject *page_forget(PyObject *self, PyObject *none) {
    (void)none;
    Page *own = (Page *)self;
    if (page_of(self)) {
        count_hidden(own, now_ns());
        own->open = 0;
        own->open_after = own->entered;
    }
    Py_RETURN_NONE;
}

/* --- messages of the script ----------------------------------------------------------------------------------------- */

static PyObject *page_section(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (has_wrong_count(n, 3, "section")) return NULL;
    struct page *page = page_of(self);
    double timeout_s = PyFloat_AsDouble(args[1]);
    unsigned long long since = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (!since) since = now_ns();
    if (!page || !is_shown()) return PyLong_FromUnsignedLongLong(since);
    struct section *section = &page->section;
    begin(&section->sequence);
    section->since = since;
    section->timeout_ns = timeout_s > 0 ? (uint64_t)(timeout_s * 1e9) : 0;
    int failed = put_text(section->name, sizeof section->name, args[0]);
    end(&section->sequence);
    return failed ? NULL : PyLong_FromUnsignedLongLong(since);
}

static PyObject *page_message(PyObject *self, PyObject *text) {
    struct page *page = page_of(self);
    if (!page) Py_RETURN_NONE;
    begin(&page->message.sequence);
    page->message.at = now_ns();
    int failed = put_text(page->message.text, sizeof page->message.text, text);
    end(&page->message.sequence);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *page_error(PyObject *self, PyObject *text) {
    struct page *page = page_of(self);
    if (!page) Py_RETURN_NONE;
    begin(&page->error.sequence);
    page->error.at = now_ns();
    int failed = put_text(page->error.text, sizeof page->error.text, text);
    end(&page->error.sequence);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* --- creation ------------------------------------------------------------------------------------------------------- */

/* Reset the page: another process may have written it, for example if the script runs programs in turn. */
static void claim(struct page *page) {
    uint64_t now = now_ns();
    atomic_store(&page->header.pid, 0);
    clear(&page->section.sequence, sizeof page->section);
    clear(&page->message.sequence, sizeof page->message);
    clear(&page->error.sequence, sizeof page->error);
    for (int i = 0; i < RING; i++) clear(&page->ring[i].sequence, sizeof page->ring[i]);
    for (int i = 0; i < GROUPS; i++) clear(&page->groups[i].sequence, sizeof page->groups[i]);
    clear(&page->totals.sequence, sizeof page->totals);
    page->totals.flags = page->header.repeat_steps || page->header.repeat_to ? REPEATS : 0;
    struct progress *p = &page->progress;
    begin(&p->sequence);
    memset((char *)p + sizeof p->sequence, 0, sizeof *p - sizeof p->sequence);
    p->phase_since = p->step_since = now;
    end(&p->sequence);
    page->header.opened_at = now;
    atomic_store(&page->header.pid, (uint32_t)getpid());
}

static PyObject *page_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    int file;
    if (!PyArg_ParseTuple(args, "i", &file)) return NULL;
    Page *self = (Page *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    void *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    self->page = memory == MAP_FAILED ? NULL : memory;
    self->known = malloc(KNOWN_GROUPS * sizeof *self->known); /* the kernel allocates pages only on first use */
    if (!self->page || !self->known) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    claim(self->page);
    this_process_writes = 1;
    meet_thread();
    opener = mine.number;
    mine.phase = STARTING;
    shown_trains = 0;
    atomic_store(&shown, opener);
    return (PyObject *)self;
}

static void page_dealloc(PyObject *object) {
    Page *self = (Page *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->page) munmap(self->page, PAGE);
    free(self->known);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef page_methods[] = {
    {"phase", page_phase, METH_O, "Enter a phase; return the phase before."},
    {"mark", page_mark, METH_O, "Enter a phase, unless the script has named the current one."},
    {"back", page_back, METH_O, "Return to the phase before mark()."},
    {"step", page_step, METH_NOARGS, "Count a completed step, if part of one has run."},
    {"evaluates", page_evaluates, METH_O, "Begin or end an evaluation."},
    {"awaits", page_awaits, METH_NOARGS, "The rest of this backward pass waits for collectives."},
    {"total", page_total, METH_O, "Note how many steps the script will take."},
    {"repeats", page_repeats, METH_O, "The next steps, so many, were lost and are taken again."},
    {"number", page_number, METH_O, "Set the number of completed steps to the script's own count."},
    {"buckets", (PyCFunction)(void (*)(void))page_buckets, METH_FASTCALL, "Set the number of buckets, launched ones, finished ones."},
    {"group_timeout", page_group_timeout, METH_O, "Note the timeout of a group, in seconds."},
    {"group", (PyCFunction)(void (*)(void))page_group, METH_FASTCALL, "Add a group (name, size, members); return its number."},
    {"enter", (PyCFunction)(void (*)(void))page_enter, METH_FASTCALL, "Start a collective; return its ticket."},
    {"leave", page_leave, METH_O, "End the collective with this ticket."},
    {"forget", page_forget, METH_NOARGS, "No collective that has started runs any more."},
    {"section", (PyCFunction)(void (*)(void))page_section, METH_FASTCALL, "Start a section (name, timeout or 0, start or 0 for now); return its start."},
    {"message", page_message, METH_O, "Show a status message to users."},
    {"error", page_error, METH_O, "Show an error to the launcher."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot page_slots[] = {
    {Py_tp_new, page_new}, {Py_tp_dealloc, page_dealloc}, {Py_tp_methods, page_methods}, {0, NULL}};
static PyType_Spec page_spec = {"ddp.telemetry._page.Page", sizeof(Page), 0, Py_TPFLAGS_DEFAULT, page_slots};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "ddp.telemetry._page",
                                        .m_doc = "The writer of a rank's status page.",
                                        .m_size = -1};

PyMODINIT_FUNC PyInit__page(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = PyType_FromSpec(&page_spec);
    if (!module || !type || PyModule_AddObjectRef(module, "Page", type)) return NULL;
    Py_DECREF(type);
    if (pthread_key_create(&at_thread_end, thread_ended)) return PyErr_NoMemory();
    pthread_atfork(NULL, NULL, in_forked_child);
    return module;
}
