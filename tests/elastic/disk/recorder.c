/* Records what a process does to the files below RECORDER_ROOT, and lets chosen calls fail. For LD_PRELOAD.
 *
 * The record (RECORDER_FILE) is enough to compute what a disk may hold after a loss of power: journal.py does it. Each
 * call is made and recorded under one lock, so the record has the order of the calls. It would be wrong if a call that
 * changes files were not known here; journal.py therefore compares the end of the record with the real files.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { MOST_FILES = 4096 };

struct record { /* followed by the path, then by the second path or the data */
    char op;
    char padding[3];
    int32_t pid, fd, flags;
    int64_t offset;
    uint32_t path_bytes, more_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1;
static const char *root;
static char is_ours[MOST_FILES]; /* by file descriptor */
static char fail_op;
static long fail_in;
static int fail_with;

static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_open)(const char *, int, ...);

__attribute__((constructor)) static void begin(void)
{
    real_write = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    real_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    root = getenv("RECORDER_ROOT");
    const char *file = getenv("RECORDER_FILE");
    if (file)
        journal = real_open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int below_root(const char *path)
{
    return journal >= 0 && root && path && !strncmp(path, root, strlen(root));
}

static int known(int fd)
{
    return fd >= 0 && fd < MOST_FILES && is_ours[fd];
}

static void record(char op, int fd, int flags, int64_t offset, const char *path, const void *more, size_t n)
{
    struct record head = {.op = op, .pid = getpid(), .fd = fd, .flags = flags, .offset = offset,
                          .path_bytes = path ? strlen(path) : 0, .more_bytes = n};
    size_t total = sizeof head + head.path_bytes + n;
    char *text = malloc(total);
    memcpy(text, &head, sizeof head);
    if (path)
        memcpy(text + sizeof head, path, head.path_bytes);
    if (n)
        memcpy(text + sizeof head + head.path_bytes, more, n);
    if (real_write(journal, text, total) != (ssize_t)total)
        abort();
    free(text);
}

/* Whether this call is to fail now: errno is set then. Without an error to fail with, the process is killed. */
static int fails(char op)
{
    if (!fail_in || (fail_op != '*' && fail_op != op) || --fail_in)
        return 0;
    if (!fail_with)
        raise(SIGKILL);
    errno = fail_with;
    return 1;
}

/* --- for the program under test ---------------------------------------------------------------- */

void recorder_mark(int number)
{
    pthread_mutex_lock(&lock);
    record('M', 0, number, 0, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
}

/* The n-th call of this kind fails ('*': of any kind), and with a lasting error (n < 0) all from the -n-th on. */
static int lasts;
void recorder_fail(char op, long n, int with)
{
    pthread_mutex_lock(&lock);
    fail_op = op;
    fail_in = n < 0 ? -n : n;
    fail_with = with;
    lasts = n < 0;
    pthread_mutex_unlock(&lock);
}

static int fails_here(char op)
{
    int result = fails(op);
    if (result && lasts)
        fail_in = 1;
    return result;
}

/* --- calls --------------------------------------------------------------------------------------- */

#define CALL(type, name, ...) ((type)dlsym(RTLD_NEXT, name))(__VA_ARGS__)

static int opened(const char *path, int flags, mode_t mode)
{
    if (!below_root(path))
        return real_open(path, flags, mode);
    pthread_mutex_lock(&lock);
    int fd = -1;
    if (!fails_here(flags & O_CREAT ? 'O' : 'R')) {
        fd = real_open(path, flags, mode);
        if (fd >= MOST_FILES)
            abort();
        if (fd >= 0) {
            is_ours[fd] = 1;
            record('O', fd, flags, 0, path, NULL, 0);
        }
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define OPEN(name)                           \
    int name(const char *path, int flags, ...) \
    {                                        \
        va_list rest;                        \
        va_start(rest, flags);               \
        mode_t mode = va_arg(rest, mode_t);  \
        va_end(rest);                        \
        return opened(path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)

int close(int fd)
{
    if (known(fd))
        is_ours[fd] = 0;
    return CALL(int (*)(int), "close", fd);
}

/* A disk that is full takes half of the last write, and then no more. */
static int was_short;
ssize_t write(int fd, const void *data, size_t n)
{
    if (!known(fd))
        return real_write(fd, data, n);
    pthread_mutex_lock(&lock);
    ssize_t done = -1;
    int failed = fails_here('W');
    if (failed && errno == ENOSPC && n > 1 && !was_short) {
        failed = 0;
        n /= 2;
        fail_in = was_short = 1;
    } else if (failed) {
        was_short = 0;
    }
    if (!failed) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        done = real_write(fd, data, n);
        if (done > 0)
            record('W', fd, 0, at, NULL, data, done);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

static int synced(const char *name, int fd)
{
    if (!known(fd))
        return CALL(int (*)(int), name, fd);
    pthread_mutex_lock(&lock);
    int result = -1;
    if (!fails_here('S')) {
        record('S', fd, 0, 0, NULL, NULL, 0); /* the disk of the simulation is the only one that matters */
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int fd)
{
    return synced("fsync", fd);
}

int fdatasync(int fd)
{
    return synced("fdatasync", fd);
}

static int with_path(char op, const char *name, const char *path, const char *more, int mode)
{
    pthread_mutex_lock(&lock);
    int result = -1;
    if (!fails_here(op)) {
        if (op == 'N')
            result = CALL(int (*)(const char *, const char *), name, path, more);
        else if (op == 'D')
            result = CALL(int (*)(const char *, mode_t), name, path, mode);
        else
            result = CALL(int (*)(const char *), name, path);
        if (!result)
            record(op, 0, 0, 0, path, more, more ? strlen(more) : 0);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int rename(const char *from, const char *to)
{
    if (!below_root(to))
        return CALL(int (*)(const char *, const char *), "rename", from, to);
    return with_path('N', "rename", from, to, 0);
}

int mkdir(const char *path, mode_t mode)
{
    if (!below_root(path))
        return CALL(int (*)(const char *, mode_t), "mkdir", path, mode);
    return with_path('D', "mkdir", path, NULL, mode);
}

int unlink(const char *path)
{
    if (!below_root(path))
        return CALL(int (*)(const char *), "unlink", path);
    return with_path('U', "unlink", path, NULL, 0);
}

int rmdir(const char *path)
{
    if (!below_root(path))
        return CALL(int (*)(const char *), "rmdir", path);
    return with_path('X', "rmdir", path, NULL, 0);
}

/* Not between a call of another thread and its record. */
void _exit(int code)
{
    pthread_mutex_lock(&lock);
    CALL(void (*)(int), "_exit", code);
    __builtin_unreachable();
}
