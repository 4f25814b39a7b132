/* Linear combinations of byte strings over the field of 256 elements, for the erasure code of commits.
 *
 * An element is a polynomial over GF(2) of degree below 8, its bits are the coefficients. Products are reduced modulo
 * x^8 + x^4 + x^3 + x^2 + 1. Sums are exclusive ors. Multiplication by a constant c is linear over GF(2), so
 *
 *     c * x = low[x & 15] ^ high[x >> 4]       two tables of 16 bytes, which one shuffle instruction looks up
 *     c * x = M * x                            a matrix of 8 x 8 bits, which one affine instruction (GFNI) multiplies
 *
 * The tables and matrices are computed for each call: a call has few coefficients and many bytes. The loop for plain C
 * needs no instruction set, and the tests compare the others with it. All give the same bytes.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

enum { MOST = 255, REDUCED = 0x1d, AT_ONCE = 4, PIECE = 8192 };

typedef const uint8_t *const *sources;

/* What the loops need to know about one coefficient. */
struct factor {
    _Alignas(32) uint8_t low[16], high[16];
    uint64_t matrix;
    uint8_t value;
};

static uint8_t product(uint8_t a, uint8_t b) {
    uint8_t sum = 0;
    for (; b; b >>= 1) {
        if (b & 1) sum ^= a;
        a = (uint8_t)(a << 1 ^ (a & 0x80 ? REDUCED : 0));
    }
    return sum;
}

static void prepare(struct factor *f, uint8_t value) {
    f->value = value;
    for (int i = 0; i < 16; i++) {
        f->low[i] = product(value, (uint8_t)i);
        f->high[i] = product(value, (uint8_t)(i << 4));
    }
    f->matrix = 0; /* byte 7 - i is the row that gives bit i of the product */
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            if (product(value, (uint8_t)(1 << j)) >> i & 1) f->matrix |= (uint64_t)1 << ((7 - i) * 8 + j);
        }
    }
}

/* One row of the combination. `f` has a factor for each input. */
static void row_plain(const struct factor *f, int n_inputs, sources in, uint8_t *out, size_t from, size_t to) {
    memset(out + from, 0, to - from);
    for (int j = 0; j < n_inputs; j++) {
        const uint8_t *x = in[j];
        for (size_t i = from; i < to; i++) out[i] ^= f[j].low[x[i] & 15] ^ f[j].high[x[i] >> 4];
    }
}

/* All inputs with the factor 1. The compiler vectorizes it. */
static void row_xor(int n_inputs, sources in, uint8_t *out, size_t n) {
    for (size_t from = 0; from < n; from += PIECE) { /* the piece of the output stays in the cache */
        size_t to = n - from < PIECE ? n : from + PIECE;
        memcpy(out + from, in[0] + from, to - from);
        for (int j = 1; j < n_inputs; j++) {
            const uint8_t *x = in[j];
            for (size_t i = from; i < to; i++) out[i] ^= x[i];
        }
    }
}

#if HAS_X86
/* Up to AT_ONCE rows share the loads of the inputs. Returns how many bytes were done. The number of rows is a constant in
 * each copy, so that the sums stay in registers. */
#define LOOP(NAME, SET, VECTOR, WIDTH, LOAD, STORE, ZERO, XOR, PREPARE, TIMES) \
    __attribute__((target(SET), always_inline)) static inline size_t NAME##_rows( \
        int rows, const struct factor *f, int n_inputs, sources in, uint8_t *const *out, size_t n) { \
        size_t i = 0; \
        for (; i + WIDTH <= n; i += WIDTH) { \
            VECTOR sum[AT_ONCE]; \
            for (int r = 0; r < rows; r++) sum[r] = ZERO; \
            for (int j = 0; j < n_inputs; j++) { \
                VECTOR x = LOAD((const void *)(in[j] + i)); \
                PREPARE \
                for (int r = 0; r < rows; r++) { \
                    const struct factor *c = f + r * n_inputs + j; \
                    sum[r] = XOR(sum[r], TIMES); \
                } \
            } \
            for (int r = 0; r < rows; r++) STORE((void *)(out[r] + i), sum[r]); \
        } \
        return i; \
    } \
    __attribute__((target(SET))) static size_t NAME(int rows, const struct factor *f, int n_inputs, sources in, \
                                                    uint8_t *const *out, size_t n) { \
        switch (rows) { \
            case 1: return NAME##_rows(1, f, n_inputs, in, out, n); \
            case 2: return NAME##_rows(2, f, n_inputs, in, out, n); \
            case 3: return NAME##_rows(3, f, n_inputs, in, out, n); \
            default: return NAME##_rows(AT_ONCE, f, n_inputs, in, out, n); \
        } \
    }

#define TABLE_128(t) _mm_load_si128((const __m128i *)(t))
#define TABLE_256(t) _mm256_broadcastsi128_si256(TABLE_128(t))

LOOP(loop_ssse3, "ssse3", __m128i, 16, _mm_loadu_si128, _mm_storeu_si128, _mm_setzero_si128(), _mm_xor_si128,
     const __m128i nibble = _mm_set1_epi8(15); __m128i lo = _mm_and_si128(x, nibble);
     __m128i hi = _mm_and_si128(_mm_srli_epi64(x, 4), nibble);
     , _mm_xor_si128(_mm_shuffle_epi8(TABLE_128(c->low), lo), _mm_shuffle_epi8(TABLE_128(c->high), hi)))

LOOP(loop_avx2, "avx2", __m256i, 32, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_setzero_si256(), _mm256_xor_si256,
     const __m256i nibble = _mm256_set1_epi8(15); __m256i lo = _mm256_and_si256(x, nibble);
     __m256i hi = _mm256_and_si256(_mm256_srli_epi64(x, 4), nibble);
     , _mm256_xor_si256(_mm256_shuffle_epi8(TABLE_256(c->low), lo), _mm256_shuffle_epi8(TABLE_256(c->high), hi)))

LOOP(loop_gfni, "avx512f,avx512bw,gfni", __m512i, 64, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_setzero_si512(),
     _mm512_xor_si512, , _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64((long long)c->matrix), 0))

static int has_ssse3(void) { return __builtin_cpu_supports("ssse3"); }
static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
static int has_gfni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("gfni");
}
#define SETS {"gfni", loop_gfni, has_gfni}, {"avx2", loop_avx2, has_avx2}, {"ssse3", loop_ssse3, has_ssse3},
#else
#define SETS
#endif

static int always(void) { return 1; }

static const struct set {
    const char *name;
    size_t (*loop)(int, const struct factor *, int, sources, uint8_t *const *, size_t); /* NULL: plain C */
    int (*is_supported)(void);
} sets[] = {SETS{"plain", NULL, always}};

enum { N_SETS = sizeof sets / sizeof *sets };
static _Atomic(const struct set *) choice; /* threads that choose at the same time choose the same */

static const struct set *chosen(void) {
    const struct set *found = atomic_load(&choice);
    for (int i = 0; found == NULL; i++) {
        if (sets[i].is_supported()) found = &sets[i];
    }
    atomic_store(&choice, found);
    return found;
}

static int all_ones(const struct factor *f, int n) {
    for (int j = 0; j < n; j++) {
        if (f[j].value != 1) return 0;
    }
    return 1;
}

static void combine(const struct factor *f, int n_rows, int n_inputs, sources in, uint8_t *const *out, size_t n) {
    const struct set *set = chosen();
    if (n_rows == 1 && all_ones(f, n_inputs)) {
        row_xor(n_inputs, in, out[0], n);
        return;
    }
    for (int first = 0; first < n_rows; first += AT_ONCE) {
        int rows = n_rows - first < AT_ONCE ? n_rows - first : AT_ONCE;
        const struct factor *mine = f + first * n_inputs;
        size_t done = set->loop == NULL ? 0 : set->loop(rows, mine, n_inputs, in, out + first, n);
        for (int r = 0; r < rows; r++) row_plain(mine + r * n_inputs, n_inputs, in, out[first + r], done, n);
    }
}

/* --- the module ----------------------------------------------------------------------------------------- */

struct buffers {
    Py_ssize_t held;
    Py_buffer views[MOST];
};

static void release(struct buffers *b) {
    while (b->held) PyBuffer_Release(&b->views[--b->held]);
}

static int acquire(struct buffers *b, PyObject *objects, int flags) {
    Py_ssize_t count = PyTuple_Size(objects);
    b->held = 0;
    if (count < 1 || count > MOST) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%zd buffers; use 1 to %d", count, MOST);
        return -1;
    }
    for (; b->held < count; b->held++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(objects, b->held), &b->views[b->held], flags) < 0) {
            release(b);
            return -1;
        }
    }
    return 0;
}

static int equal_lengths(const struct buffers *b, Py_ssize_t length) {
    for (Py_ssize_t i = 0; i < b->held; i++) {
        if (b->views[i].len != length) return 0;
    }
    return 1;
}

static int run(const uint8_t *coefficients, const struct buffers *in, const struct buffers *out) {
    const uint8_t *from[MOST];
    uint8_t *to[MOST];
    int n_inputs = (int)in->held, n_rows = (int)out->held;
    struct factor *f = PyMem_Malloc(sizeof *f * (size_t)(n_inputs * n_rows) + 32);
    if (f == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    struct factor *aligned = (struct factor *)(((uintptr_t)f + 31) & ~(uintptr_t)31);
    for (int i = 0; i < n_inputs * n_rows; i++) prepare(&aligned[i], coefficients[i]);
    for (int i = 0; i < n_inputs; i++) from[i] = in->views[i].buf;
    for (int i = 0; i < n_rows; i++) to[i] = out->views[i].buf;
    Py_BEGIN_ALLOW_THREADS
    combine(aligned, n_rows, n_inputs, from, to, (size_t)out->views[0].len);
    Py_END_ALLOW_THREADS
    PyMem_Free(f);
    return 0;
}

static PyObject *py_combine(PyObject *self, PyObject *args) {
    (void)self;
    const char *coefficients;
    Py_ssize_t n_coefficients;
    PyObject *inputs, *outputs;
    struct buffers in, out;
    if (!PyArg_ParseTuple(args, "y#O!O!", &coefficients, &n_coefficients, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs))
        return NULL;
    if (acquire(&in, inputs, PyBUF_SIMPLE) < 0) return NULL;
    if (acquire(&out, outputs, PyBUF_WRITABLE) < 0) {
        release(&in);
        return NULL;
    }
    int failed = 1;
    if (n_coefficients != in.held * out.held) {
        PyErr_Format(PyExc_ValueError, "%zd coefficients for %zd rows of %zd", n_coefficients, out.held, in.held);
    } else if (!equal_lengths(&in, out.views[0].len) || !equal_lengths(&out, out.views[0].len)) {
        PyErr_SetString(PyExc_ValueError, "the buffers have different lengths");
    } else {
        failed = run((const uint8_t *)coefficients, &in, &out) < 0;
    }
    release(&out);
    release(&in);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_sets(PyObject *self, PyObject *ignored) {
    (void)self, (void)ignored;
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < N_SETS; i++) {
        if (!sets[i].is_supported()) continue;
        PyObject *name = PyUnicode_FromString(sets[i].name);
        if (name == NULL || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_choose(PyObject *self, PyObject *args) {
    (void)self;
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    for (int i = 0; i < N_SETS; i++) {
        if (strcmp(sets[i].name, name) == 0 && sets[i].is_supported()) {
            atomic_store(&choice, &sets[i]);
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this CPU does not support the instruction set %s", name);
}

static PyMethodDef methods[] = {
    {"combine", py_combine, METH_VARARGS, "combine(coefficients, inputs, outputs): outputs = matrix * inputs"},
    {"sets", py_sets, METH_NOARGS, "sets(): the instruction sets that this CPU supports, the fastest first"},
    {"choose", py_choose, METH_VARARGS, "choose(name): use this instruction set"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_erasure", "Linear combinations over GF(256).", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__erasure(void);
PyMODINIT_FUNC PyInit__erasure(void) { return PyModule_Create(&definition); }
