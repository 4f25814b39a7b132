/* Copies of much memory that go around the caches.
 *
 * A usual store reads the line that it overwrites into the cache, and later it is written back: three transfers for a
 * copy where two are enough. A commit overwrites a slot that nobody reads soon, so its stores go to the memory directly.
 * The lines of the state and of the training stay in the cache.
 *
 * The stores of SSE2 are in every processor of this architecture. Wider ones are not faster: the memory is the limit.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#define HAS_STREAMS 1
#include <emmintrin.h>
#else
#define HAS_STREAMS 0
#endif

enum { LINE = 64, AHEAD = 16 * LINE };

typedef struct {
    uint64_t to, from, n_bytes;
} Row;

#if HAS_STREAMS
static inline __m128i loaded(const uint8_t *from) { return _mm_loadu_si128((const void *)from); }

static inline void stored(uint8_t *to, __m128i value) { _mm_stream_si128((void *)to, value); }

static void copied(uint8_t *to, const uint8_t *from, size_t n) {
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (head > n) head = n;
    memcpy(to, from, head);
    size_t at = head;
    for (; at + LINE <= n; at += LINE) {
        _mm_prefetch((const void *)(from + at + AHEAD), _MM_HINT_NTA);
        __m128i a = loaded(from + at), b = loaded(from + at + 16);
        __m128i c = loaded(from + at + 32), d = loaded(from + at + 48);
        stored(to + at, a), stored(to + at + 16, b);
        stored(to + at + 32, c), stored(to + at + 48, d);
    }
    memcpy(to + at, from + at, n - at);
}

static void settled(void) { _mm_sfence(); } /* other processes see a mark that follows only after the data */
#else
static void copied(uint8_t *to, const uint8_t *from, size_t n) { memcpy(to, from, n); }

static void settled(void) {}
#endif

/* --- the module ----------------------------------------------------------------------------------------- */

static PyObject *py_copy(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer rows;
    if (!PyArg_ParseTuple(args, "y*", &rows)) return NULL;
    if (rows.len % (Py_ssize_t)sizeof(Row)) {
        PyBuffer_Release(&rows);
        PyErr_SetString(PyExc_ValueError, "a row has three numbers of 64 bits");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < rows.len; at += (Py_ssize_t)sizeof(Row)) {
        Row row;
        memcpy(&row, (const uint8_t *)rows.buf + at, sizeof row);
        copied((uint8_t *)(uintptr_t)row.to, (const uint8_t *)(uintptr_t)row.from, (size_t)row.n_bytes);
    }
    settled();
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    Py_RETURN_NONE;
}

static PyObject *py_is_fast(PyObject *self, PyObject *ignored) {
    (void)self, (void)ignored;
    return PyBool_FromLong(HAS_STREAMS);
}

static PyMethodDef methods[] = {
    {"is_fast", py_is_fast, METH_NOARGS, "is_fast(): whether copies go around the caches"},
    {"copy", py_copy, METH_VARARGS, "copy(rows): rows of three 64-bit numbers: target, source, bytes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_bulk_copy", "Copies around the caches.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__bulk_copy(void);
PyMODINIT_FUNC PyInit__bulk_copy(void) { return PyModule_Create(&definition); }
