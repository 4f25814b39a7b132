/* Reductions over plain arrays. Their loops are compiled for several instruction sets. The first reduction selects the
 * best set that this CPU and the system support. The choice is made here, not by the loader, so it needs no particular
 * libc, and works with any compiler that supports these instructions. All sets give the same bits. */
#include "core.h"

#include <string.h>

enum { BLOCK = 512, DEPTH = 9 }; /* 2^(DEPTH - 1) = MAX_MEMBERS sources */
_Static_assert(MAX_MEMBERS <= 1 << (DEPTH - 1), "sum_block needs a larger DEPTH");

const size_t element_bytes[ELEMENTS] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};
const char *const element_names[ELEMENTS] = {"float64", "float32", "float16", "bfloat16", "int64",
                                             "int32",   "int16",   "int8",    "uint8",    "bool"};

struct kernels {
    void (*fold_F64)(enum reduction, double *restrict, const double *, const double *, size_t);
    void (*fold_F32)(enum reduction, float *restrict, const float *, const float *, size_t);
    void (*fold_I64)(enum reduction, int64_t *restrict, const int64_t *, const int64_t *, size_t);
    void (*fold_I32)(enum reduction, int32_t *restrict, const int32_t *, const int32_t *, size_t);
    void (*fold_I16)(enum reduction, int16_t *restrict, const int16_t *, const int16_t *, size_t);
    void (*fold_I8)(enum reduction, int8_t *restrict, const int8_t *, const int8_t *, size_t);
    void (*fold_U8)(enum reduction, uint8_t *restrict, const uint8_t *, const uint8_t *, size_t);
    void (*fold_BOOL)(enum reduction, uint8_t *restrict, const uint8_t *, const uint8_t *, size_t);
    void (*widen_F16)(float *restrict, const uint16_t *restrict, size_t);
    void (*narrow_F16)(uint16_t *restrict, const float *restrict, size_t);
    void (*widen_BF16)(float *restrict, const uint16_t *restrict, size_t);
    void (*narrow_BF16)(uint16_t *restrict, const float *restrict, size_t);
    void (*divide_F32)(float *restrict, const float *, float, size_t);
    void (*divide_F64)(double *restrict, const double *, double, size_t);
};

#define EACH(expression) \
    for (size_t i = 0; i < n; i++) to[i] = (expression); \
    break;

#define ARITHMETIC(T, WIDE) \
    case SUM: EACH((T)((WIDE)a[i] + (WIDE)b[i])) \
    case PRODUCT: EACH((T)((WIDE)a[i] * (WIDE)b[i])) \
    case MINIMUM: EACH(b[i] < a[i] ? b[i] : a[i]) \
    case MAXIMUM: EACH(b[i] > a[i] ? b[i] : a[i])

#define FOLD_FLOAT(NAME, T) \
    static void NAMED(fold_##NAME)(enum reduction r, T *restrict to, const T *a, const T *b, size_t n) { \
        switch (r) { ARITHMETIC(T, T) default: break; } \
    }

/* Sums wrap around; signed ones are formed as unsigned. */
#define FOLD_INT(NAME, T, WIDE) \
    static void NAMED(fold_##NAME)(enum reduction r, T *restrict to, const T *a, const T *b, size_t n) { \
        switch (r) { \
            ARITHMETIC(T, WIDE) \
            case BIT_AND: EACH(a[i] & b[i]) \
            case BIT_OR: EACH(a[i] | b[i]) \
            case BIT_XOR: EACH(a[i] ^ b[i]) \
            default: break; \
        } \
    }

#define JOIN(name, set) name##_##set
#define NAMED_IN(name, set) JOIN(name, set)
#define NAMED(name) NAMED_IN(name, SET)

#define SET plain
#include "loops.h"
#undef SET

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define AVX2 "avx2,fma,bmi,bmi2"
#define AVX512 AVX2 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#define PRAGMA(words) _Pragma(#words)
#ifdef __clang__
#define BEGIN(set) PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define END _Pragma("clang attribute pop")
#else
#define BEGIN(set) _Pragma("GCC push_options") PRAGMA(GCC target(set))
#define END _Pragma("GCC pop_options")
#endif

BEGIN(AVX2)
#define SET avx2
#include "loops.h"
#undef SET
END

BEGIN(AVX512)
#define SET avx512
#include "loops.h"
#undef SET
END

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#define SETS {"avx512", &kernels_avx512, has_avx512}, {"avx2", &kernels_avx2, has_avx2},
#else
#define SETS
#endif

#ifdef __aarch64__
#define PLAIN "neon" /* part of every arm64, and so of the plain loops */
#else
#define PLAIN "plain"
#endif

static int always(void) { return 1; }

static const struct {
    const char *name;
    const struct kernels *kernels;
    int (*is_supported)(void);
} sets[] = {SETS{PLAIN, &kernels_plain, always}};

enum { N_SETS = sizeof sets / sizeof *sets };
static _Atomic(const struct kernels *) choice; /* threads that choose at the same time choose the same */

static int best_from(int first) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#endif
    while (!sets[first].is_supported()) first++;
    return first;
}

static const struct kernels *chosen(void) {
    const struct kernels *now = atomic_load_explicit(&choice, memory_order_relaxed);
    if (!now) atomic_store_explicit(&choice, now = sets[best_from(0)].kernels, memory_order_relaxed);
    return now;
}

const char *kernels_in_use(void) {
    int i = 0;
    while (sets[i].kernels != chosen()) i++;
    return sets[i].name;
}

int use_kernels(const char *name) {
    for (int i = 0; i < N_SETS; i++) {
        if (strcmp(name, sets[i].name) || best_from(i) != i) continue;
        choice = sets[i].kernels;
        return 1;
    }
    return 0;
}

union accumulator {
    double f64[BLOCK];
    float f32[BLOCK];
    _Alignas(LINE) char bytes[BLOCK * 8];
};

/* `to` is neither of the others: the compiler may then use the widest instructions. */
static void fold(const struct kernels *k, enum element e, enum reduction r, void *to, const void *a, const void *b,
                 size_t n) {
    switch (e) {
        case F64: k->fold_F64(r, to, a, b, n); break;
        case F32: k->fold_F32(r, to, a, b, n); break;
        case I64: k->fold_I64(r, to, a, b, n); break;
        case I32: k->fold_I32(r, to, a, b, n); break;
        case I16: k->fold_I16(r, to, a, b, n); break;
        case I8: k->fold_I8(r, to, a, b, n); break;
        case U8: k->fold_U8(r, to, a, b, n); break;
        default: k->fold_BOOL(r, to, a, b, n); break;
    }
}

static void widen(const struct kernels *k, enum element e, float *to, const void *from, size_t n) {
    if (e == F16) k->widen_F16(to, from, n);
    else k->widen_BF16(to, from, n);
}

static void narrow(const struct kernels *k, enum element e, void *to, const float *from, size_t n) {
    if (e == F16) k->narrow_F16(to, from, n);
    else k->narrow_BF16(to, from, n);
}

/* The sums of a block that wait for their right half: at most one for each power of two below the number of sources. */
struct halves {
    int waiting, free;
    const char *sum[DEPTH];
    union accumulator *in[DEPTH], *spare[DEPTH + 1]; /* in: the buffer of a sum; NULL for a source that is used in place */
};

static void join_last_two(const struct kernels *k, enum element e, enum reduction r, size_t n, struct halves *h) {
    int left = h->waiting - 2, right = h->waiting - 1;
    union accumulator *to = h->spare[--h->free];
    fold(k, e, r, to->bytes, h->sum[left], h->sum[right], n);
    for (int i = left; i <= right; i++)
        if (h->in[i]) h->spare[h->free++] = h->in[i];
    h->sum[left] = to->bytes;
    h->in[left] = to;
    h->waiting--;
}

/* The sources are summed as a binary tree: (0 + 1) + (2 + 3), and so on. So the sum over 4 ranks has the bits of the sum
 * over 2 ranks that have each summed two sources. Half-precision sources are converted first, others used in place. */
static const char *sum_block(const struct kernels *k, enum element e, enum reduction r, size_t at, size_t n,
                             int sources, const char *const *from, union accumulator *sums) {
    int half = e == F16 || e == BF16;
    struct halves h = {.free = DEPTH + 1};
    for (int i = 0; i <= DEPTH; i++) h.spare[i] = sums + i;
    for (int s = 0; s < sources; s++) {
        union accumulator *wide = half ? h.spare[--h.free] : NULL;
        if (half) widen(k, e, wide->f32, from[s] + at, n);
        h.in[h.waiting] = wide;
        h.sum[h.waiting++] = half ? wide->bytes : from[s] + at;
        for (int count = s + 1; h.waiting > 1 && (s + 1 == sources || !(count & 1)); count >>= 1)
            join_last_two(k, half ? F32 : e, r, n, &h);
    }
    return h.sum[0];
}

static const char *finish_block(const struct kernels *k, enum element e, double divisor, size_t n, const char *sum,
                                union accumulator *spare) {
    if (divisor != 1 && e == F64) k->divide_F64(spare[0].f64, (const double *)sum, divisor, n);
    if (divisor != 1 && e != F64) k->divide_F32(spare[0].f32, (const float *)sum, (float)divisor, n);
    if (divisor != 1) sum = spare[0].bytes;
    if (e != F16 && e != BF16) return sum;
    narrow(k, e, spare[1].bytes, (const float *)sum, n);
    return spare[1].bytes;
}

/* `to` may be one of `from`: a block of all sources is read before any block is written. */
void reduce(enum element e, enum reduction r, double divisor, size_t count, int sources, const char *const *from,
            int targets, char *const *to) {
    const struct kernels *k = chosen();
    union accumulator room[DEPTH + 3];
    size_t bytes = element_bytes[e];
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t n = count - done < BLOCK ? count - done : BLOCK, at = done * bytes;
        const char *sum = sum_block(k, e, r, at, n, sources, from, room);
        sum = finish_block(k, e, divisor, n, sum, room + DEPTH + 1);
        for (int t = 0; t < targets; t++)
            if (to[t] + at != sum) memcpy(to[t] + at, sum, n * bytes);
    }
}

void divide(enum element e, double divisor, size_t count, char *data) {
    const char *from[1] = {data};
    if (divisor != 1) reduce(e, SUM, divisor, count, 1, from, 1, &data);
}
