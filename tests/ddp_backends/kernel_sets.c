/* Every set of kernels that this CPU can run gives the bits of the plain one: all types and reductions, random bits, with
 * and without a divisor. NaNs need not be the same NaN. Prints the sets; exits 1 at the first difference. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 3000, SOURCES = 7, ROUNDS = 20 };
static uint64_t state = 88172645463325252u;

static uint64_t chance(void) {
    state ^= state << 13, state ^= state >> 7;
    return state ^= state << 17;
}

static int is_nan(enum element e, const char *at) {
    uint64_t bits = 0;
    memcpy(&bits, at, element_bytes[e]);
    if (e == F64) return (bits << 1) > 0x7ffull << 53;
    if (e == F32) return (bits & 0x7fffffff) > 0x7f800000;
    if (e == F16) return (bits & 0x7fff) > 0x7c00;
    return e == BF16 && (bits & 0x7fff) > 0x7f80;
}

static int differ(enum element e, const char *one, const char *other) {
    size_t bytes = element_bytes[e];
    for (size_t i = 0; i < COUNT * bytes; i += bytes)
        if (memcmp(one + i, other + i, bytes) && !(is_nan(e, one + i) && is_nan(e, other + i))) return 1;
    return 0;
}

static char *computed(const char *set, enum element e, enum reduction r, double divisor, char *from[SOURCES]) {
    char *to = malloc(COUNT * 8);
    if (!to || !use_kernels(set)) exit(3);
    reduce(e, r, divisor, COUNT, SOURCES, (const char *const *)from, 1, &to);
    return to;
}

static int compare(const char *set, char *from[SOURCES]) {
    for (int e = 0; e < ELEMENTS; e++)
        for (int r = SUM; r <= BIT_XOR; r++)
            for (double divisor = 1; divisor <= 3; divisor += 2) {
                if (e <= BF16 ? r > MAXIMUM : divisor != 1) continue;
                char *one = computed("plain", e, r, divisor, from), *other = computed(set, e, r, divisor, from);
                int wrong = differ(e, one, other);
                if (wrong) printf("%s differs: %s, reduction %d, divisor %g\n", set, element_names[e], r, divisor);
                free(one), free(other);
                if (wrong) return 1;
            }
    return 0;
}

int main(void) {
    static const char *const sets[] = {"avx2", "avx512"};
    char *from[SOURCES];
    for (int s = 0; s < SOURCES; s++) from[s] = malloc(COUNT * 8);
    for (int i = 0; i < 2; i++) {
        if (!use_kernels(sets[i])) continue;
        for (int round = 0; round < ROUNDS; round++) {
            for (int s = 0; s < SOURCES; s++)
                for (size_t at = 0; at < COUNT * 8; at += 8) memcpy(from[s] + at, (uint64_t[]){chance()}, 8);
            if (compare(sets[i], from)) return 1;
        }
        printf("%s ", sets[i]);
    }
    return use_kernels("no such set");
}
