/* The CRC-32 of zip files, of many bytes at once: commits have a checksum of each tensor.
 *
 * A string of bytes is a polynomial over GF(2), its first bit has the highest power. The checksum is its remainder by a
 * polynomial P of degree 32. The remainder stays the same if 128 bits that D bits follow are replaced by
 *
 *     first half * (x^(D + 64) mod P) + second half * (x^D mod P)       added to the bits that end D bits later
 *
 * which are two products without carries, and so one instruction each. Four blocks are folded side by side, so that
 * no product waits for the one before. The last block is divided bit by bit, with a table for each byte.
 *
 * In this CRC the first bit of a byte is its lowest one. A product of reversed factors is the reversed product, one bit
 * further: a shift to the left corrects it, and is part of the constants. The factors have 64 bits and the constants 32,
 * so the constants of D are those of x^(D + 32) and x^(D - 32).
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

enum { BLOCK = 16, AT_ONCE = 4 };
static const uint32_t REVERSED_P = 0xedb88320;

static uint32_t table[256];
static uint64_t far_high, far_low, near_high, near_low; /* constants for AT_ONCE blocks, and for one */

/* The remainder of x^n, reversed, shifted as a factor has to be. */
static uint64_t power(unsigned n) {
    uint32_t found = (uint32_t)1 << 31;
    for (; n; n--) found = found >> 1 ^ (found & 1 ? REVERSED_P : 0);
    return (uint64_t)found << 1;
}

static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        table[byte] = byte;
        for (int bit = 0; bit < 8; bit++) table[byte] = table[byte] >> 1 ^ (table[byte] & 1 ? REVERSED_P : 0);
    }
    const unsigned near = 8 * BLOCK, far = near * AT_ONCE;
    far_high = power(far + 32), far_low = power(far - 32);
    near_high = power(near + 32), near_low = power(near - 32);
}

static uint32_t by_table(uint32_t state, const uint8_t *data, size_t n) {
    for (size_t i = 0; i < n; i++) state = state >> 8 ^ table[(state ^ data[i]) & 255];
    return state;
}

#if HAS_X86
#define TARGET __attribute__((target("pclmul,sse4.1")))

TARGET static inline __m128i folded(__m128i block, __m128i constants, __m128i later) {
    __m128i high = _mm_clmulepi64_si128(block, constants, 0x00), low = _mm_clmulepi64_si128(block, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(high, low), later);
}

static inline __m128i loaded(const uint8_t *data) { return _mm_loadu_si128((const void *)data); }

/* `n` is at least one round. The state is what the table would have: it is added to the first bytes. */
TARGET static uint32_t by_products(uint32_t state, const uint8_t *data, size_t n) {
    const __m128i far = _mm_set_epi64x((long long)far_low, (long long)far_high);
    const __m128i near = _mm_set_epi64x((long long)near_low, (long long)near_high);
    const size_t round = BLOCK * AT_ONCE;
    __m128i sums[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) sums[i] = loaded(data + i * BLOCK);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)state));
    size_t at = round;
    for (; at + round <= n; at += round) {
        for (int i = 0; i < AT_ONCE; i++) sums[i] = folded(sums[i], far, loaded(data + at + i * BLOCK));
    }
    __m128i sum = sums[0];
    for (int i = 1; i < AT_ONCE; i++) sum = folded(sum, near, sums[i]);
    for (; at + BLOCK <= n; at += BLOCK) sum = folded(sum, near, loaded(data + at));
    uint8_t last[BLOCK];
    _mm_storeu_si128((void *)last, sum);
    return by_table(by_table(0, last, BLOCK), data + at, n - at);
}

static int has_products(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#else
static uint32_t by_products(uint32_t state, const uint8_t *data, size_t n) { return by_table(state, data, n); }
static int has_products(void) { return 0; }
#endif

static uint32_t checksum(uint32_t before, const uint8_t *data, size_t n) {
    uint32_t state = ~before;
    int by_blocks = n >= BLOCK * AT_ONCE && has_products();
    return ~(by_blocks ? by_products(state, data, n) : by_table(state, data, n));
}

/* --- the module ----------------------------------------------------------------------------------------- */

static PyObject *py_crc32(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer data;
    unsigned int before;
    if (!PyArg_ParseTuple(args, "y*I", &data, &before)) return NULL;
    uint32_t found;
    Py_BEGIN_ALLOW_THREADS
    found = checksum(before, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

static PyObject *py_is_fast(PyObject *self, PyObject *ignored) {
    (void)self, (void)ignored;
    return PyBool_FromLong(has_products());
}

static PyMethodDef methods[] = {
    {"is_fast", py_is_fast, METH_NOARGS, "is_fast(): whether this CPU has products without carries"},
    {"crc32", py_crc32, METH_VARARGS, "crc32(data, before): what zlib.crc32 returns"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_checksum", "CRC-32 by products without carries.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__checksum(void);
PyMODINIT_FUNC PyInit__checksum(void) {
    prepare();
    return PyModule_Create(&definition);
}
