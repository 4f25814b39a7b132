/* The Python module: Group, with post and wait; Block, a buffer in the shared file. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    struct group *group;
} Group;

typedef struct {
    PyObject_HEAD
    struct segment *segment;
    char *at;
    Py_ssize_t bytes;
} Block;

static PyTypeObject *block_type;

/* --- Block -------------------------------------------------------------------------------------------------------- */

static void block_dealloc(PyObject *self) {
    Block *block = (Block *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (block->at) segment_free(block->segment, block->at);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int block_buffer(PyObject *self, Py_buffer *view, int flags) {
    Block *block = (Block *)self;
    return PyBuffer_FillInfo(view, self, block->at, block->bytes, 0, flags);
}

static PyType_Slot block_slots[] = {{Py_tp_dealloc, block_dealloc}, {Py_bf_getbuffer, block_buffer}, {0, NULL}};
static PyType_Spec block_spec = {"ddp.groups._native.Block", sizeof(Block), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots};

/* --- Group: from its parts to its end ------------------------------------------------------------------------------- */

static int integers(PyObject *list, int *to, int room) {
    Py_ssize_t n = PyList_Size(list);
    if (n < 0) return -1;
    if (n > room) {
        PyErr_Format(PyExc_ValueError, "more than %d members on one host", room);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        long value = PyLong_AsLong(PyList_GetItem(list, i));
        if (value == -1 && PyErr_Occurred()) return -1;
        to[i] = (int)value;
    }
    return (int)n;
}

static int labels(struct ring *ring, PyObject *list) {
    ring->hosts = calloc((size_t)ring->nodes + 1, sizeof *ring->hosts);
    if (!ring->hosts) PyErr_NoMemory();
    for (int h = 0; ring->hosts && h < ring->nodes; h++) {
        PyObject *label = PyList_GetItem(list, h);
        const char *text = label ? PyUnicode_AsUTF8AndSize(label, NULL) : NULL;
        if (!text) return -1;
        strncpy(ring->hosts[h].label, text, LABEL - 1);
    }
    return ring->hosts ? 0 : -1;
}

static void discard(struct group *g) {
    if (g->segment) segment_release(g->segment);
    free(g->scratch);
    free(g->ring.scratch);
    free(g->ring.hosts);
    free(g);
}

/* If there is a CPU for each member, checking a few hundred times before sleeping is faster. */
static int spins_for(int members) {
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus)) return 0;
    return members < CPU_COUNT(&cpus) ? 400 : 0;
}

static PyObject *started(PyTypeObject *type, struct group *g) {
    Group *self = (Group *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    if (queue_start(g)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_OSError, "cannot start a thread. Check the limit on processes (ulimit -u)");
        return NULL;
    }
    remember_group(g);
    self->group = g;
    return (PyObject *)self;
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"file", "member", "sockets", "ranks", "staging", "region", "leaders", "ring", "hosts", NULL};
    int file, me, leaders;
    Py_ssize_t staging, region;
    PyObject *sockets, *ranks, *hosts, *made;
    struct group *g = calloc(1, sizeof *g);
    if (!g) return PyErr_NoMemory();
    struct ring *ring = &g->ring;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiO!O!nni(iiiiii)O!", names, &file, &me, &PyList_Type, &sockets,
                                     &PyList_Type, &ranks, &staging, &region, &leaders, &ring->nodes, &ring->node,
                                     &ring->next, &ring->previous, &ring->next_rank, &ring->previous_rank,
                                     &PyList_Type, &hosts) ||
        integers(ranks, g->ranks, MAX_MEMBERS) < 0 || (g->size = integers(sockets, g->peers, MAX_MEMBERS)) < 0 ||
        labels(ring, hosts)) {
        discard(g);
        return NULL;
    }
    g->me = me;
    g->leaders = leaders;
    g->spins = spins_for(g->size);
    g->scratch = malloc(SMALL);
    ring->scratch = ring->nodes ? malloc(RING_SCRATCH) : NULL;
    if (!g->scratch || (ring->nodes && !ring->scratch) ||
        segment_open(&g->segment, file, g->size, me, (size_t)staging, (size_t)region)) {
        discard(g);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    g->shared = (struct shared *)g->segment->base;
    made = started(type, g);
    if (!made) discard(g);
    return made;
}

/* A forked child has no worker thread to join, and a mutex may stay locked. */
static void close_group(struct group *g) {
    if (g->closed) return;
    g->closed = 1;
    if (g->forked) return;
    Py_BEGIN_ALLOW_THREADS
    queue_stop(g);
    atomic_store(&g->shared->members[g->me].left, 1);
    forget_group(g);
    Py_END_ALLOW_THREADS
}

static void group_dealloc(PyObject *self) {
    struct group *g = ((Group *)self)->group;
    PyTypeObject *type = Py_TYPE(self);
    if (g) {
        close_group(g);
        if (!g->forked) discard(g);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Results can also be read after the group is closed: every operation has one then. */
static struct group *own_group(PyObject *self) {
    struct group *g = ((Group *)self)->group;
    if (!g->forked) return g;
    PyErr_SetString(PyExc_RuntimeError, "this process group belongs to the parent process. Create a group in this process");
    return NULL;
}

static struct group *open_group(PyObject *self) {
    struct group *g = own_group(self);
    if (g && g->closed) {
        PyErr_SetString(PyExc_RuntimeError, "this process group has been destroyed. Create a new one");
        return NULL;
    }
    return g;
}

static PyObject *group_close(PyObject *self, PyObject *ignored) {
    (void)ignored;
    close_group(((Group *)self)->group);
    Py_RETURN_NONE;
}

static PyObject *group_abort(PyObject *self, PyObject *ignored) {
    (void)ignored;
    struct group *g = open_group(self);
    if (!g) return NULL;
    fail(g, ABORTED, g->ranks[g->me]);
    Py_RETURN_NONE;
}

/* --- posting -------------------------------------------------------------------------------------------------------- */

/* [address, bytes, address, bytes, ...] */
static int fill(struct spans *list, PyObject *numbers) {
    list->number = (int)(PyList_Size(numbers) / 2);
    list->bytes = 0;
    for (int i = 0; i < list->number; i++) {
        struct span *piece = &list->pieces[i];
        piece->at = PyLong_AsVoidPtr(PyList_GetItem(numbers, 2 * i));
        piece->bytes = PyLong_AsSize_t(PyList_GetItem(numbers, 2 * i + 1));
        piece->start = list->bytes;
        list->bytes += piece->bytes;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *group_post(PyObject *self, PyObject *args) {
    struct group *g = open_group(self);
    int kind, element, reduction, root, for_the_worker;
    double divisor, timeout_s;
    Py_ssize_t count;
    unsigned long long tag;
    PyObject *input, *output;
    if (!g || !PyArg_ParseTuple(args, "iiiinddpO!O!K", &kind, &element, &reduction, &root, &count, &divisor,
                                &timeout_s, &for_the_worker, &PyList_Type, &input, &PyList_Type, &output, &tag))
        return NULL;
    size_t pieces = (size_t)(PyList_Size(input) + PyList_Size(output)) / 2;
    struct operation *op = calloc(1, sizeof *op + pieces * sizeof(struct span));
    if (!op) return PyErr_NoMemory();
    op->kind = (enum kind)kind;
    op->element = (enum element)element;
    op->reduction = (enum reduction)reduction;
    op->root = root;
    op->count = (size_t)count;
    op->divisor = divisor;
    op->tag = tag;
    op->timeout_s = timeout_s;
    op->input.pieces = (struct span *)(op + 1);
    op->output.pieces = op->input.pieces + PyList_Size(input) / 2;
    if (fill(&op->input, input) || fill(&op->output, output)) {
        free(op);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(queue_post(g, op, for_the_worker));
}

/* --- waiting -------------------------------------------------------------------------------------------------------- */

static _Thread_local PyThreadState *left_python;

/* Called at intervals by a Python thread that waits without the GIL. */
static int signal_raised(void) {
    PyEval_RestoreThread(left_python);
    int raised = PyErr_CheckSignals() < 0;
    left_python = PyEval_SaveThread();
    return raised;
}

static PyObject *group_wait(PyObject *self, PyObject *args) {
    struct group *g = own_group(self);
    unsigned long long ticket;
    double timeout_s;
    int may_execute;
    if (!g || !PyArg_ParseTuple(args, "Kdp", &ticket, &timeout_s, &may_execute)) return NULL;
    Py_INCREF(self);
    left_python = PyEval_SaveThread();
    int result = queue_wait(g, ticket, timeout_s, may_execute, signal_raised);
    PyEval_RestoreThread(left_python);
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

/* A blocking all-reduce of one tensor. Most calls are of this kind, so it does not allocate, parse or queue. */
static PyObject *group_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = open_group(self);
    if (!g) return NULL;
    if (n != 6) {
        PyErr_SetString(PyExc_TypeError, "all_reduce takes element, reduction, divisor, timeout, address and size");
        return NULL;
    }
    struct operation op = {.kind = ALL_REDUCE,
                           .element = (enum element)PyLong_AsLong(args[0]),
                           .reduction = (enum reduction)PyLong_AsLong(args[1]),
                           .divisor = PyFloat_AsDouble(args[2]),
                           .timeout_s = PyFloat_AsDouble(args[3])};
    struct span whole = {PyLong_AsVoidPtr(args[4]), 0, PyLong_AsSize_t(args[5])};
    if (PyErr_Occurred()) return NULL;
    op.count = whole.bytes / element_bytes[op.element];
    op.output = (struct spans){&whole, 1, whole.bytes};
    Py_INCREF(self);
    left_python = PyEval_SaveThread();
    int result = queue_run(g, &op, signal_raised);
    PyEval_RestoreThread(left_python);
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

static PyObject *group_state(PyObject *self, PyObject *ticket) {
    struct group *g = own_group(self);
    unsigned long long number = g ? PyLong_AsUnsignedLongLong(ticket) : 0;
    if (!g || PyErr_Occurred()) return NULL;
    return PyLong_FromLong(queue_done(g, number));
}

static PyObject *group_want(PyObject *self, PyObject *ticket) {
    struct group *g = own_group(self);
    unsigned long long number = g ? PyLong_AsUnsignedLongLong(ticket) : 0;
    if (!g || PyErr_Occurred()) return NULL;
    queue_want(g, number);
    Py_RETURN_NONE;
}

static PyObject *group_failure(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyUnicode_FromString(((Group *)self)->group->failure);
}

static PyObject *group_allocate(PyObject *self, PyObject *bytes) {
    struct group *g = open_group(self);
    Py_ssize_t wanted = g ? PyLong_AsSsize_t(bytes) : 0;
    if (!g || PyErr_Occurred()) return NULL;
    char *at = segment_allocate(g->segment, (size_t)wanted);
    if (!at) return PyErr_NoMemory();
    Block *block = (Block *)((allocfunc)PyType_GetSlot(block_type, Py_tp_alloc))(block_type, 0);
    if (!block) {
        segment_free(g->segment, at);
        return NULL;
    }
    *block = (Block){block->ob_base, g->segment, at, wanted};
    return (PyObject *)block;
}

static PyMethodDef group_methods[] = {
    {"post", group_post, METH_VARARGS, "Queue an operation, and return its sequence number (ticket)."},
    {"wait", group_wait, METH_VARARGS, "Wait for an operation. Return 0 (done), -1 (failed) or -2 (not done)."},
    {"all_reduce", (PyCFunction)(void (*)(void))group_all_reduce, METH_FASTCALL,
     "All-reduce one tensor now. Return -2 without doing anything if other operations are pending."},
    {"state", group_state, METH_O, "Return the result of an operation, as wait() does, without waiting."},
    {"want", group_want, METH_O, "Make the thread of the group execute all operations up to this one."},
    {"failure", group_failure, METH_NOARGS, "Return the failure of the group as text; empty if there is none."},
    {"allocate", group_allocate, METH_O, "Allocate memory that peers can read without a copy."},
    {"abort", group_abort, METH_NOARGS, "Abort the group for all its members."},
    {"close", group_close, METH_NOARGS, "Leave the group."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new}, {Py_tp_dealloc, group_dealloc}, {Py_tp_methods, group_methods}, {0, NULL}};
static PyType_Spec group_spec = {"ddp.groups._native.Group", sizeof(Group), 0, Py_TPFLAGS_DEFAULT, group_slots};

/* --- the module ------------------------------------------------------------------------------------------------------ */

static PyObject *length(PyObject *self, PyObject *args) {
    (void)self;
    int members;
    Py_ssize_t staging, region;
    if (!PyArg_ParseTuple(args, "inn", &members, &staging, &region)) return NULL;
    return PyLong_FromSize_t(segment_length(members, (size_t)staging, (size_t)region));
}

static PyObject *guard_signal(PyObject *self, PyObject *args) {
    (void)self;
    int number;
    double grace_s;
    if (!PyArg_ParseTuple(args, "id", &number, &grace_s)) return NULL;
    return PyBool_FromLong(guard(number, grace_s));
}

static PyObject *overdue_signal(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLong(overdue());
}

static PyObject *forgive_signal(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    forget_ignored();
    Py_RETURN_NONE;
}

static PyObject *kernels(PyObject *self, PyObject *args) {
    (void)self;
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s", &name)) return NULL;
    if (name && !use_kernels(name)) return PyErr_Format(PyExc_ValueError, "this CPU cannot run the kernels %s", name);
    return PyUnicode_FromString(kernels_in_use());
}

static PyMethodDef functions[] = {
    {"kernels", kernels, METH_VARARGS, "Return the instruction set of the sums. With a name, tests select one."},
    {"length", length, METH_VARARGS, "Return the size of the shared file for this number of members, in bytes."},
    {"guard_signal", guard_signal, METH_VARARGS, "Ignore this signal unless the parent process sends it."},
    {"overdue_signal", overdue_signal, METH_NOARGS, "Return an ignored signal that the launcher has not answered in time, or 0."},
    {"forgive_signal", forgive_signal, METH_NOARGS, "Forget the ignored signal: the launcher has answered it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "ddp.groups._native",
                                        .m_doc = "Collectives over shared memory and TCP.",
                                        .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    block_type = (PyTypeObject *)PyType_FromSpec(&block_spec);
    PyObject *group = PyType_FromSpec(&group_spec);
    if (!module || !block_type || !group || PyModule_AddObjectRef(module, "Group", group)) return NULL;
    Py_DECREF(group);
    return module;
}
