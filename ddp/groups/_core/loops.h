/* The loops over plain arrays, included by kernels.c once for each set of instructions: NAMED(x) is x of that set.
 * Half-precision numbers are summed as floats and rounded once. */

FOLD_FLOAT(F64, double)
FOLD_FLOAT(F32, float)
FOLD_INT(I64, int64_t, uint64_t)
FOLD_INT(I32, int32_t, uint32_t)
FOLD_INT(I16, int16_t, uint32_t)
FOLD_INT(I8, int8_t, uint32_t)
FOLD_INT(U8, uint8_t, uint32_t)

static void NAMED(fold_BOOL)(enum reduction r, uint8_t *restrict to, const uint8_t *a, const uint8_t *b, size_t n) {
    switch (r) {
        case SUM: case MAXIMUM: case BIT_OR: EACH((a[i] | b[i]) != 0)
        case PRODUCT: case MINIMUM: case BIT_AND: EACH((a[i] != 0) & (b[i] != 0))
        default: EACH((a[i] != 0) ^ (b[i] != 0))
    }
}

/* Without a branch, so that every compiler finds vector instructions for the loop. */
static inline uint32_t NAMED(either)(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = -(uint32_t)(condition != 0);
    return (yes & mask) | (no & ~mask);
}

static inline float NAMED(as_float)(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t NAMED(as_bits)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The exponent is moved by a multiplication, which makes the subnormals right as well. */
static void NAMED(widen_F16)(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(from[i] & 0x7fff) << 13, sign = (uint32_t)(from[i] & 0x8000) << 16;
        uint32_t finite = NAMED(as_bits)(NAMED(as_float)(magnitude) * 0x1p112f);
        to[i] = NAMED(as_float)(sign | NAMED(either)(magnitude >= 0x0f800000, magnitude | 0x7f800000, finite));
    }
}

static void NAMED(narrow_F16)(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = NAMED(as_bits)(from[i]), magnitude = bits & 0x7fffffff;
        uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        uint32_t subnormal = NAMED(as_bits)(NAMED(as_float)(magnitude) + 0.5f) - 0x3f000000; /* 0.5's last digit is 2^-24 */
        uint32_t half = NAMED(either)(magnitude < 0x38800000, subnormal, normal);
        half = NAMED(either)(magnitude >= 0x477ff000, 0x7c00, half);
        half = NAMED(either)(magnitude > 0x7f800000, 0x7e00, half);
        to[i] = (uint16_t)(half | ((bits >> 16) & 0x8000));
    }
}

static void NAMED(widen_BF16)(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = NAMED(as_float)((uint32_t)from[i] << 16);
}

static void NAMED(narrow_BF16)(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = NAMED(as_bits)(from[i]);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

static void NAMED(divide_F32)(float *restrict to, const float *a, float divisor, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = a[i] / divisor;
}

static void NAMED(divide_F64)(double *restrict to, const double *a, double divisor, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = a[i] / divisor;
}

static const struct kernels NAMED(kernels) = {
    .fold_F64 = NAMED(fold_F64), .fold_F32 = NAMED(fold_F32), .fold_I64 = NAMED(fold_I64),
    .fold_I32 = NAMED(fold_I32), .fold_I16 = NAMED(fold_I16), .fold_I8 = NAMED(fold_I8),
    .fold_U8 = NAMED(fold_U8), .fold_BOOL = NAMED(fold_BOOL), .widen_F16 = NAMED(widen_F16),
    .narrow_F16 = NAMED(narrow_F16), .widen_BF16 = NAMED(widen_BF16), .narrow_BF16 = NAMED(narrow_BF16),
    .divide_F32 = NAMED(divide_F32), .divide_F64 = NAMED(divide_F64),
};
