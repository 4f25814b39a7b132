/* Reductions over plain arrays, compiled several times for the CPUs that may be met; the loader picks one.
 * Half-precision numbers are summed as floats and rounded once. */
#include "core.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(ONE_TARGET)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { BLOCK = 512 };

const size_t element_bytes[ELEMENTS] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};
const char *const element_names[ELEMENTS] = {"float64", "float32", "float16", "bfloat16", "int64",
                                             "int32",   "int16",   "int8",    "uint8",    "bool"};

#define EACH(expression) \
    for (size_t i = 0; i < n; i++) to[i] = (expression); \
    break;

#define ARITHMETIC(T, WIDE) \
    case SUM: EACH((T)((WIDE)a[i] + (WIDE)b[i])) \
    case PRODUCT: EACH((T)((WIDE)a[i] * (WIDE)b[i])) \
    case MINIMUM: EACH(b[i] < a[i] ? b[i] : a[i]) \
    case MAXIMUM: EACH(b[i] > a[i] ? b[i] : a[i])

#define FOLD_FLOAT(NAME, T) \
    CLONES static void fold_##NAME(enum reduction r, T *restrict to, const T *a, const T *b, size_t n) { \
        switch (r) { ARITHMETIC(T, T) default: break; } \
    }

/* Sums wrap around; signed ones are formed as unsigned. */
#define FOLD_INT(NAME, T, WIDE) \
    CLONES static void fold_##NAME(enum reduction r, T *restrict to, const T *a, const T *b, size_t n) { \
        switch (r) { \
            ARITHMETIC(T, WIDE) \
            case BIT_AND: EACH(a[i] & b[i]) \
            case BIT_OR: EACH(a[i] | b[i]) \
            case BIT_XOR: EACH(a[i] ^ b[i]) \
            default: break; \
        } \
    }

FOLD_FLOAT(F64, double)
FOLD_FLOAT(F32, float)
FOLD_INT(I64, int64_t, uint64_t)
FOLD_INT(I32, int32_t, uint32_t)
FOLD_INT(I16, int16_t, uint32_t)
FOLD_INT(I8, int8_t, uint32_t)
FOLD_INT(U8, uint8_t, uint32_t)

CLONES static void fold_BOOL(enum reduction r, uint8_t *restrict to, const uint8_t *a, const uint8_t *b, size_t n) {
    switch (r) {
        case SUM: case MAXIMUM: case BIT_OR: EACH((a[i] | b[i]) != 0)
        case PRODUCT: case MINIMUM: case BIT_AND: EACH((a[i] != 0) & (b[i] != 0))
        default: EACH((a[i] != 0) ^ (b[i] != 0))
    }
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The exponent is moved by a multiplication, which makes the subnormals right as well. */
CLONES static void widen_F16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(from[i] & 0x7fff) << 13, sign = (uint32_t)(from[i] & 0x8000) << 16;
        uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);
        to[i] = as_float(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
    }
}

CLONES static void narrow_F16(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(from[i]), magnitude = bits & 0x7fffffff;
        uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000; /* 0.5's last digit is 2^-24 */
        uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
        half = magnitude >= 0x477ff000 ? 0x7c00 : half;
        half = magnitude > 0x7f800000 ? 0x7e00 : half;
        to[i] = (uint16_t)(half | ((bits >> 16) & 0x8000));
    }
}

CLONES static void widen_BF16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

CLONES static void narrow_BF16(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(from[i]);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

CLONES static void divide_F32(float *restrict to, const float *a, float divisor, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = a[i] / divisor;
}

CLONES static void divide_F64(double *restrict to, const double *a, double divisor, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = a[i] / divisor;
}

union accumulator {
    double f64[BLOCK];
    float f32[BLOCK];
    _Alignas(LINE) char bytes[BLOCK * 8];
};

/* `to` is neither of the others: the compiler may then use the widest instructions. */
static void fold(enum element e, enum reduction r, void *to, const void *a, const void *b, size_t n) {
    switch (e) {
        case F64: fold_F64(r, to, a, b, n); break;
        case F32: fold_F32(r, to, a, b, n); break;
        case I64: fold_I64(r, to, a, b, n); break;
        case I32: fold_I32(r, to, a, b, n); break;
        case I16: fold_I16(r, to, a, b, n); break;
        case I8: fold_I8(r, to, a, b, n); break;
        case U8: fold_U8(r, to, a, b, n); break;
        default: fold_BOOL(r, to, a, b, n); break;
    }
}

static void widen(enum element e, float *to, const void *from, size_t n) {
    if (e == F16) widen_F16(to, from, n);
    else widen_BF16(to, from, n);
}

static void narrow(enum element e, void *to, const float *from, size_t n) {
    if (e == F16) narrow_F16(to, from, n);
    else narrow_BF16(to, from, n);
}

/* Half-precision sources are widened into `sums` in turn; others are folded from where they are. */
static const char *sum_block(enum element e, enum reduction r, size_t at, size_t n, int sources,
                             const char *const *from, union accumulator *sums) {
    int half = e == F16 || e == BF16, turn = 0;
    union accumulator *other = sums + 2;
    const char *sum = from[0] + at;
    if (half) widen(e, sums[1].f32, sum, n);
    if (half) sum = sums[1].bytes;
    for (int s = 1; s < sources; s++, turn ^= 1) {
        if (half) widen(e, other->f32, from[s] + at, n);
        fold(half ? F32 : e, r, sums[turn].bytes, sum, half ? other->bytes : from[s] + at, n);
        sum = sums[turn].bytes;
    }
    return sum;
}

static const char *finish_block(enum element e, double divisor, size_t n, const char *sum, union accumulator *spare) {
    if (divisor != 1 && e == F64) divide_F64(spare[0].f64, (const double *)sum, divisor, n);
    if (divisor != 1 && e != F64) divide_F32(spare[0].f32, (const float *)sum, (float)divisor, n);
    if (divisor != 1) sum = spare[0].bytes;
    if (e != F16 && e != BF16) return sum;
    narrow(e, spare[1].bytes, (const float *)sum, n);
    return spare[1].bytes;
}

/* `to` may be among `from`: a block is read from everywhere before it is written anywhere. */
void reduce(enum element e, enum reduction r, double divisor, size_t count, int sources, const char *const *from,
            int targets, char *const *to) {
    union accumulator room[5];
    size_t bytes = element_bytes[e];
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t n = count - done < BLOCK ? count - done : BLOCK, at = done * bytes;
        const char *sum = sum_block(e, r, at, n, sources, from, room);
        sum = finish_block(e, divisor, n, sum, room + 3);
        for (int t = 0; t < targets; t++)
            if (to[t] + at != sum) memcpy(to[t] + at, sum, n * bytes);
    }
}

void divide(enum element e, double divisor, size_t count, char *data) {
    const char *from[1] = {data};
    if (divisor != 1) reduce(e, SUM, divisor, count, 1, from, 1, &data);
}
