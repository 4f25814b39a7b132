/* For wheels only (-include): bind to the oldest version of each symbol that the linker would take in its newest.
 * glibc 2.32 and 2.34 moved these functions from libpthread and libdl to libc; their code is the same. An interpreter
 * for an older glibc has loaded both libraries, and the loader finds the symbols there. */
#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#define SETCLOCK "GLIBC_2.3.3"
#define NAMING "GLIBC_2.12"
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
#define SETCLOCK BASE
#define NAMING BASE
#else
#error "no list of symbols for this machine"
#endif

#define BIND(name, version) __asm__(".symver " #name "," #name "@" version);
BIND(dlopen, BASE)
BIND(dlsym, BASE)
BIND(pthread_create, BASE)
BIND(pthread_join, BASE)
BIND(pthread_key_create, BASE)
BIND(pthread_once, BASE)
BIND(pthread_setspecific, BASE)
BIND(pthread_sigmask, BASE)
BIND(pthread_condattr_setclock, SETCLOCK)
BIND(pthread_setname_np, NAMING)
