/* Counts gradients in hooks. ddp/reducer/arrivals.py describes the rules and has the same class in Python.
 *
 * The GIL makes each call atomic: nothing here releases it between reading and writing the state. The calls into Python
 * come last. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    PyObject *current_task, *arrived, *chunk_complete;
    long task;
    Py_ssize_t n_parameters, n_chunks, n_order;
    int *state, *chunk_of, *waiting, *order; /* one allocation, NULL: not armed */
} Arrivals;

typedef struct {
    PyObject_HEAD
    Arrivals *owner;
    long index;
} Hook;

static PyTypeObject *hook_type;

static void disarm(Arrivals *self) {
    free(self->state);
    self->state = NULL;
}

/* Returns 1 if the gradient is counted here, 0 if Python must count it, -1 with an exception. */
static int count(Arrivals *self, long index, int *chunk) {
    if (!self->state || index >= self->n_parameters) return 0;
    PyObject *number = PyObject_CallObject(self->current_task, NULL);
    if (!number) return -1;
    long task = PyLong_AsLong(number);
    Py_DECREF(number);
    if (task == -1 && PyErr_Occurred()) return -1;
    if (!self->state || task != self->task || self->state[index] || self->n_order == self->n_parameters) return 0;
    self->state[index] = 1;
    self->order[self->n_order++] = (int)index;
    *chunk = self->chunk_of[index];
    self->waiting[*chunk]--;
    return 1;
}

static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    Hook *self = (Hook *)object;
    Arrivals *owner = self->owner;
    int chunk = 0;
    int counted = count(owner, self->index, &chunk);
    if (counted < 0) return NULL;
    if (counted && owner->waiting[chunk]) Py_RETURN_NONE;
    PyObject *call = counted ? owner->chunk_complete : owner->arrived;
    PyObject *result = PyObject_CallFunction(call, "l", counted ? (long)chunk : self->index);
    if (!result) return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static void hook_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF((PyObject *)((Hook *)object)->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *arrivals_hook(PyObject *object, PyObject *argument) {
    long index = PyLong_AsLong(argument);
    if (index < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "internal error: a negative index");
        return NULL;
    }
    Hook *hook = (Hook *)((allocfunc)PyType_GetSlot(hook_type, Py_tp_alloc))(hook_type, 0);
    if (!hook) return NULL;
    Py_INCREF(object);
    hook->owner = (Arrivals *)object;
    hook->index = index;
    return (PyObject *)hook;
}

static int copy_numbers(PyObject *list, int *into, Py_ssize_t below) {
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

static PyObject *arrivals_arm(PyObject *object, PyObject *args) {
    Arrivals *self = (Arrivals *)object;
    long task;
    PyObject *states, *chunk_of, *waiting;
    if (!PyArg_ParseTuple(args, "lO!O!O!", &task, &PyList_Type, &states, &PyList_Type, &chunk_of, &PyList_Type, &waiting))
        return NULL;
    Py_ssize_t n = PyList_Size(states), n_chunks = PyList_Size(waiting);
    if (PyList_Size(chunk_of) != n) {
        PyErr_SetString(PyExc_ValueError, "internal error: each parameter needs a chunk");
        return NULL;
    }
    disarm(self);
    int *memory = malloc(sizeof(int) * (size_t)(3 * n + n_chunks + 1));
    if (!memory) return PyErr_NoMemory();
    int *chunks = memory + n, *order = chunks + n, *left = order + n;
    if (copy_numbers(states, memory, 2) || copy_numbers(chunk_of, chunks, n_chunks) ||
        copy_numbers(waiting, left, n + 1)) {
        free(memory);
        return NULL;
    }
    self->task = task, self->n_parameters = n, self->n_chunks = n_chunks, self->n_order = 0;
    self->chunk_of = chunks, self->order = order, self->waiting = left, self->state = memory;
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

static PyObject *arrivals_take(PyObject *object, PyObject *nothing) {
    (void)nothing;
    Arrivals *self = (Arrivals *)object;
    if (!self->state) Py_RETURN_NONE;
    PyObject *order = list_of(self->order, self->n_order);
    PyObject *waiting = list_of(self->waiting, self->n_chunks);
    PyObject *both = order && waiting ? PyTuple_Pack(2, order, waiting) : NULL;
    Py_XDECREF(order);
    Py_XDECREF(waiting);
    if (both) disarm(self);
    return both;
}

static int arrivals_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    Arrivals *self = (Arrivals *)object;
    PyObject *task, *arrived, *complete;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO", &task, &arrived, &complete)) return -1;
    if (self->arrived) {
        PyErr_SetString(PyExc_RuntimeError, "internal error: initialized twice");
        return -1;
    }
    Py_INCREF(task), Py_INCREF(arrived), Py_INCREF(complete);
    self->current_task = task, self->arrived = arrived, self->chunk_complete = complete;
    return 0;
}

static void arrivals_dealloc(PyObject *object) {
    Arrivals *self = (Arrivals *)object;
    PyTypeObject *type = Py_TYPE(object);
    disarm(self);
    Py_XDECREF(self->current_task);
    Py_XDECREF(self->arrived);
    Py_XDECREF(self->chunk_complete);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"hook", arrivals_hook, METH_O, "Return the hook of a parameter."},
    {"arm", arrivals_arm, METH_VARARGS, "Count the gradients of one task."},
    {"take", arrivals_take, METH_NOARGS, "Stop; return the order of the gradients and what each chunk waits for."},
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
    if (!module || !arrivals || !hook_type || PyModule_AddObject(module, "Arrivals", arrivals) < 0) return NULL;
    return module;
}
