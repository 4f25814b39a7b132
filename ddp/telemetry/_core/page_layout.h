/* Made by docs/page_layout.py of ddp/telemetry/contracts.py, which says what each field means: `make layout`. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { PAGE = 4096, PHASES = 12, RING = 16, GROUPS = 12, BINS = 24, KNOWN_GROUPS = 4096 };
enum phase { STARTING, DATA, FORWARD, BACKWARD, COMMUNICATE, OPTIMIZER, CHECKPOINT, EVALUATION, SECTION, IDLE, EXITING };
enum { NUMBERED = 1, REPEATS = 2, UNCAUGHT = 4 }; /* flags of the totals */
enum { ASYNC = 1, PAIR = 2 }; /* flags of a collective */

typedef _Atomic uint64_t counter;

struct header {
    char magic[8];
    uint32_t version;
    uint32_t size;
    uint32_t wishes;
    _Atomic uint32_t pid;
    uint64_t opened_at;
    uint64_t repeat_steps;
    uint64_t repeat_to;
};
struct progress {
    counter sequence;
    uint32_t phase;
    uint32_t account;
    uint64_t phase_since;
    uint64_t step;
    uint64_t step_since;
    uint64_t last_step_ns;
    uint64_t mean_step_ns;
    uint64_t phase_ns[12];
    uint32_t buckets;
    uint32_t launched;
    uint32_t finished;
    uint32_t unused;
    uint64_t launched_at;
    uint64_t finished_at;
    uint64_t group_timeout_ns;
};
struct section {
    counter sequence;
    uint64_t since;
    uint64_t timeout_ns;
    char name[104];
};
struct message {
    counter sequence;
    uint64_t at;
    char text[240];
};
struct error {
    counter sequence;
    uint64_t at;
    char text[368];
};
struct collective {
    counter sequence;
    uint64_t number;
    uint64_t group_sequence;
    uint64_t entered_at;
    uint64_t finished_at;
    uint64_t numel;
    uint32_t shape;
    uint32_t group;
    int32_t peer;
    uint32_t flags;
    char op[20];
    char dtype[12];
};
struct group {
    counter sequence;
    uint32_t group;
    uint32_t size;
    uint64_t entered;
    uint64_t finished;
    char name[40];
    char members[24];
};
struct totals {
    counter sequence;
    uint64_t checkpoint_step;
    uint32_t checkpoints;
    uint32_t flags;
    uint64_t first_step_at;
    uint64_t formed_at;
    uint64_t total_steps;
    uint64_t unused[3];
    uint64_t step_sum_ns;
    uint64_t call_sum_ns;
    uint64_t repeated_ns[12];
    uint32_t steps[24];
    uint32_t calls[24];
    uint64_t hidden_ns;
};
struct page {
    _Alignas(64) struct header header;
    _Alignas(64) struct progress progress;
    _Alignas(64) struct section section;
    _Alignas(64) struct message message;
    _Alignas(64) struct error error;
    _Alignas(64) struct collective ring[16];
    _Alignas(64) struct group groups[12];
    _Alignas(64) struct totals totals;
};
_Static_assert(offsetof(struct page, header) == 0, "");
_Static_assert(offsetof(struct header, magic) == 0, "");
_Static_assert(offsetof(struct header, version) == 8, "");
_Static_assert(offsetof(struct header, size) == 12, "");
_Static_assert(offsetof(struct header, wishes) == 16, "");
_Static_assert(offsetof(struct header, pid) == 20, "");
_Static_assert(offsetof(struct header, opened_at) == 24, "");
_Static_assert(offsetof(struct header, repeat_steps) == 32, "");
_Static_assert(offsetof(struct header, repeat_to) == 40, "");
_Static_assert(offsetof(struct page, progress) == 64, "");
_Static_assert(offsetof(struct progress, phase) == 8, "");
_Static_assert(offsetof(struct progress, account) == 12, "");
_Static_assert(offsetof(struct progress, phase_since) == 16, "");
_Static_assert(offsetof(struct progress, step) == 24, "");
_Static_assert(offsetof(struct progress, step_since) == 32, "");
_Static_assert(offsetof(struct progress, last_step_ns) == 40, "");
_Static_assert(offsetof(struct progress, mean_step_ns) == 48, "");
_Static_assert(offsetof(struct progress, phase_ns) == 56, "");
_Static_assert(offsetof(struct progress, buckets) == 152, "");
_Static_assert(offsetof(struct progress, launched) == 156, "");
_Static_assert(offsetof(struct progress, finished) == 160, "");
_Static_assert(offsetof(struct progress, unused) == 164, "");
_Static_assert(offsetof(struct progress, launched_at) == 168, "");
_Static_assert(offsetof(struct progress, finished_at) == 176, "");
_Static_assert(offsetof(struct progress, group_timeout_ns) == 184, "");
_Static_assert(offsetof(struct page, section) == 256, "");
_Static_assert(offsetof(struct section, since) == 8, "");
_Static_assert(offsetof(struct section, timeout_ns) == 16, "");
_Static_assert(offsetof(struct section, name) == 24, "");
_Static_assert(offsetof(struct page, message) == 384, "");
_Static_assert(offsetof(struct message, at) == 8, "");
_Static_assert(offsetof(struct message, text) == 16, "");
_Static_assert(offsetof(struct page, error) == 640, "");
_Static_assert(offsetof(struct error, at) == 8, "");
_Static_assert(offsetof(struct error, text) == 16, "");
_Static_assert(offsetof(struct page, ring) == 1024, "");
_Static_assert(offsetof(struct collective, number) == 8, "");
_Static_assert(offsetof(struct collective, group_sequence) == 16, "");
_Static_assert(offsetof(struct collective, entered_at) == 24, "");
_Static_assert(offsetof(struct collective, finished_at) == 32, "");
_Static_assert(offsetof(struct collective, numel) == 40, "");
_Static_assert(offsetof(struct collective, shape) == 48, "");
_Static_assert(offsetof(struct collective, group) == 52, "");
_Static_assert(offsetof(struct collective, peer) == 56, "");
_Static_assert(offsetof(struct collective, flags) == 60, "");
_Static_assert(offsetof(struct collective, op) == 64, "");
_Static_assert(offsetof(struct collective, dtype) == 84, "");
_Static_assert(offsetof(struct page, groups) == 2560, "");
_Static_assert(offsetof(struct group, group) == 8, "");
_Static_assert(offsetof(struct group, size) == 12, "");
_Static_assert(offsetof(struct group, entered) == 16, "");
_Static_assert(offsetof(struct group, finished) == 24, "");
_Static_assert(offsetof(struct group, name) == 32, "");
_Static_assert(offsetof(struct group, members) == 72, "");
_Static_assert(offsetof(struct page, totals) == 3712, "");
_Static_assert(offsetof(struct totals, checkpoint_step) == 8, "");
_Static_assert(offsetof(struct totals, checkpoints) == 16, "");
_Static_assert(offsetof(struct totals, flags) == 20, "");
_Static_assert(offsetof(struct totals, first_step_at) == 24, "");
_Static_assert(offsetof(struct totals, formed_at) == 32, "");
_Static_assert(offsetof(struct totals, total_steps) == 40, "");
_Static_assert(offsetof(struct totals, unused) == 48, "");
_Static_assert(offsetof(struct totals, step_sum_ns) == 72, "");
_Static_assert(offsetof(struct totals, call_sum_ns) == 80, "");
_Static_assert(offsetof(struct totals, repeated_ns) == 88, "");
_Static_assert(offsetof(struct totals, steps) == 184, "");
_Static_assert(offsetof(struct totals, calls) == 280, "");
_Static_assert(offsetof(struct totals, hidden_ns) == 376, "");
_Static_assert(sizeof(struct collective) == 96, "");
_Static_assert(sizeof(struct group) == 96, "");
_Static_assert(sizeof(struct page) <= PAGE, "");
