/* Counts gradients in hooks. ddp/reducer/reducer.py describes the rules and has the same class in Python.
 *
 * The GIL makes each call atomic: nothing here releases it between reading and writing the state. A call into Python
 * is the last thing that a hook does, except for `begin`, after which the state is read anew. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

/* The expected number of gradients if it is not known: then the order is that of first gradients. */
#define ANY_NUMBER 0x7ffffffe

typedef struct {
    PyObject_HEAD
    PyObject *begin, *chunk_complete, *surplus, *local;
    Py_ssize_t n_parameters, n_chunks, n_order;
    /* One allocation, NULL: no plan. The first three describe the plan, the others a backward. */
    int *expected, *chunk_of, *members, *left, *waiting, *order, *used;
    int armed, begun, watched, exact;
} Arrivals;

typedef struct {
    PyObject_HEAD
    Arrivals *owner;
    PyObject *parameter;
    long index;
} Hook;

static PyTypeObject *hook_type;
static PyObject *grad_name;

static PyObject *call(PyObject *function, long number) {
    PyObject *result = PyObject_CallFunction(function, "l", number);
    if (!result) return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

/* A hook also runs for a parameter that was frozen after the forward, or whose gradient is undefined. -1: error. */
static int has_gradient(Hook *hook) {
    PyObject *gradient = PyObject_GetAttr(hook->parameter, grad_name);
    if (!gradient) return -1;
    int has = gradient != Py_None;
    Py_DECREF(gradient);
    return has;
}

static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    Arrivals *self = ((Hook *)object)->owner;
    long index = ((Hook *)object)->index;
    if (!self->expected || index >= self->n_parameters) Py_RETURN_NONE;
    if (!self->armed && self->exact) {
        int has = has_gradient((Hook *)object);
        if (has < 0) return NULL;
        if (!has || index >= self->n_parameters) Py_RETURN_NONE;
    }
    self->used[index] = 1;
    if (!self->armed) {
        if (self->watched) return call(self->local, index);
        Py_RETURN_NONE;
    }
    if (!self->begun) {
        self->begun = 1;
        PyObject *none = call(self->begin, index);
        if (!none) return NULL;
        Py_DECREF(none);
        if (!self->armed || index >= self->n_parameters) Py_RETURN_NONE;
        self->begun = 1; /* it may have planned and armed anew */
    }
    if (self->left[index] <= 0) return call(self->surplus, index);
    int left = --self->left[index];
    if (left && left != ANY_NUMBER - 1) Py_RETURN_NONE;
    self->order[self->n_order++] = (int)index;
    if (left) Py_RETURN_NONE;
    int chunk = self->chunk_of[index];
    if (--self->waiting[chunk]) Py_RETURN_NONE;
    return call(self->chunk_complete, chunk);
}

static void hook_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF((PyObject *)((Hook *)object)->owner);
    Py_XDECREF(((Hook *)object)->parameter);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *arrivals_hook(PyObject *object, PyObject *args) {
    long index;
    PyObject *parameter;
    if (!PyArg_ParseTuple(args, "lO", &index, &parameter)) return NULL;
    if (index < 0) {
        PyErr_SetString(PyExc_ValueError, "internal error: a negative index");
        return NULL;
    }
    Hook *hook = (Hook *)((allocfunc)PyType_GetSlot(hook_type, Py_tp_alloc))(hook_type, 0);
    if (!hook) return NULL;
    Py_INCREF(object);
    hook->owner = (Arrivals *)object;
    Py_INCREF(parameter);
    hook->parameter = parameter;
    hook->index = index;
    return (PyObject *)hook;
}

static int copy_numbers(PyObject *list, int *into, long below) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        long value = PyLong_AsLong(PyList_GetItem(list, i));
        if (value == -1 && PyErr_Occurred()) return -1;
        if (value < 0 || value >= below) {
            PyErr_SetString(PyExc_ValueError, "internal error: a number is out of range");
            return -1;
        }
        into[i] = (int)value;
    }
    return 0;
}

static PyObject *arrivals_plan(PyObject *object, PyObject *args) {
    Arrivals *self = (Arrivals *)object;
    PyObject *expected, *chunk_of;
    Py_ssize_t n_chunks;
    int exact;
    if (!PyArg_ParseTuple(args, "O!O!np", &PyList_Type, &expected, &PyList_Type, &chunk_of, &n_chunks, &exact))
        return NULL;
    Py_ssize_t n = PyList_Size(expected);
    if (PyList_Size(chunk_of) != n || n_chunks < 0) {
        PyErr_SetString(PyExc_ValueError, "internal error: each parameter needs a chunk");
        return NULL;
    }
    int *memory = calloc((size_t)(5 * n + 2 * n_chunks + 1), sizeof(int));
    if (!memory) return PyErr_NoMemory();
    if (copy_numbers(expected, memory, 0x7fffffff) || copy_numbers(chunk_of, memory + n, n_chunks)) {
        free(memory);
        return NULL;
    }
    int *used = memory + 4 * n + 2 * n_chunks;
    if (self->expected && self->n_parameters == n) memcpy(used, self->used, sizeof(int) * (size_t)n);
    free(self->expected);
    self->n_parameters = n, self->n_chunks = n_chunks, self->n_order = 0, self->armed = 0;
    self->exact = exact;
    self->expected = memory, self->chunk_of = memory + n, self->left = memory + 2 * n, self->order = memory + 3 * n;
    self->members = memory + 4 * n, self->waiting = self->members + n_chunks, self->used = used;
    for (Py_ssize_t i = 0; i < n; i++) self->members[self->chunk_of[i]]++;
    Py_RETURN_NONE;
}

static PyObject *arrivals_arm(PyObject *object, PyObject *nothing) {
    Arrivals *self = (Arrivals *)object;
    (void)nothing;
    if (self->expected) {
        memcpy(self->left, self->expected, sizeof(int) * (size_t)self->n_parameters);
        memcpy(self->waiting, self->members, sizeof(int) * (size_t)self->n_chunks);
        self->n_order = 0, self->begun = 0, self->armed = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *list_of(const int *numbers, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromLong(numbers[i]);
        if (!number) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SetItem(list, i, number);
    }
    return list;
}

static PyObject *arrivals_settle(PyObject *object, PyObject *indices) {
    Arrivals *self = (Arrivals *)object;
    if (!PyList_Check(indices)) {
        PyErr_SetString(PyExc_TypeError, "internal error: not a list");
        return NULL;
    }
    PyObject *complete = PyList_New(0);
    for (Py_ssize_t i = 0; complete && i < PyList_Size(indices); i++) {
        long index = PyLong_AsLong(PyList_GetItem(indices, i));
        if (index < 0 || !self->expected || index >= self->n_parameters) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "internal error: a number is out of range");
            Py_DECREF(complete);
            return NULL;
        }
        self->left[index] = 0;
        int chunk = self->chunk_of[index];
        if (--self->waiting[chunk]) continue;
        PyObject *number = PyLong_FromLong(chunk);
        if (!number || PyList_Append(complete, number)) Py_CLEAR(complete);
        Py_XDECREF(number);
    }
    return complete;
}

static PyObject *arrivals_disarm(PyObject *object, PyObject *nothing) {
    Arrivals *self = (Arrivals *)object;
    (void)nothing;
    self->armed = 0;
    return list_of(self->order, self->n_order);
}

static PyObject *arrivals_left(PyObject *object, PyObject *nothing) {
    Arrivals *self = (Arrivals *)object;
    (void)nothing;
    return list_of(self->left, self->expected ? self->n_parameters : 0);
}

static PyObject *arrivals_take_used(PyObject *object, PyObject *nothing) {
    Arrivals *self = (Arrivals *)object;
    (void)nothing;
    PyObject *used = list_of(self->used, self->expected ? self->n_parameters : 0);
    if (used && self->expected) memset(self->used, 0, sizeof(int) * (size_t)self->n_parameters);
    return used;
}

static PyObject *arrivals_watch(PyObject *object, PyObject *wanted) {
    int watched = PyObject_IsTrue(wanted);
    if (watched < 0) return NULL;
    ((Arrivals *)object)->watched = watched;
    Py_RETURN_NONE;
}

static int arrivals_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    Arrivals *self = (Arrivals *)object;
    PyObject *begin, *complete, *surplus, *local;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOO", &begin, &complete, &surplus, &local)) return -1;
    if (self->begin) {
        PyErr_SetString(PyExc_RuntimeError, "internal error: initialized twice");
        return -1;
    }
    Py_INCREF(begin), Py_INCREF(complete), Py_INCREF(surplus), Py_INCREF(local);
    self->begin = begin, self->chunk_complete = complete, self->surplus = surplus, self->local = local;
    return 0;
}

static void arrivals_dealloc(PyObject *object) {
    Arrivals *self = (Arrivals *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->expected);
    Py_XDECREF(self->begin);
    Py_XDECREF(self->chunk_complete);
    Py_XDECREF(self->surplus);
    Py_XDECREF(self->local);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"hook", arrivals_hook, METH_VARARGS, "Return the hook of a parameter."},
    {"plan", arrivals_plan, METH_VARARGS, "Set how often each gradient arrives, and its chunk."},
    {"arm", arrivals_arm, METH_NOARGS, "Count the gradients of the next backward."},
    {"settle", arrivals_settle, METH_O, "Do not wait for these; return the chunks that are complete now."},
    {"disarm", arrivals_disarm, METH_NOARGS, "Stop counting; return the parameters in the order of arrival."},
    {"left", arrivals_left, METH_NOARGS, "Return how many gradients of each parameter are missing."},
    {"take_used", arrivals_take_used, METH_NOARGS, "Return which parameters had a gradient, and forget it."},
    {"watch", arrivals_watch, METH_O, "Whether to report gradients that arrive while nothing is counted."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot arrivals_slots[] = {
    {Py_tp_init, arrivals_init}, {Py_tp_dealloc, arrivals_dealloc}, {Py_tp_methods, methods},
    {Py_tp_new, PyType_GenericNew}, {0, NULL},
};
static PyType_Slot hook_slots[] = {{Py_tp_call, hook_call}, {Py_tp_dealloc, hook_dealloc}, {0, NULL}};
static PyType_Spec arrivals_spec = {"ddp.reducer._arrivals.Arrivals", sizeof(Arrivals), 0, Py_TPFLAGS_DEFAULT,
                                    arrivals_slots};
static PyType_Spec hook_spec = {"ddp.reducer._arrivals.Hook", sizeof(Hook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};
static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "ddp.reducer._arrivals",
                                        .m_doc = "Counts gradients in hooks.",
                                        .m_size = -1};

PyMODINIT_FUNC PyInit__arrivals(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *arrivals = PyType_FromSpec(&arrivals_spec);
    hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    grad_name = PyUnicode_InternFromString("grad");
    if (!module || !arrivals || !hook_type || !grad_name || PyModule_AddObject(module, "Arrivals", arrivals) < 0) return NULL;
    return module;
}
