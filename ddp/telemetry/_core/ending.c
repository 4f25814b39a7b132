/* Shutdown of an interpreter whose process has C++ threads.
 *
 * A Gloo thread that releases the last reference to a tensor needs the GIL. After the interpreter has begun to shut
 * down, Python before 3.14 answers with pthread_exit. That unwinds through destructors that must not throw, so C++
 * terminates the process: "terminate called without an active exception", SIGABRT, although the rank had finished its
 * work. The handler below makes such a thread wait until the process is gone. If the process does not exit in time,
 * perhaps because it waits for this thread, the handler continues with the normal termination. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*terminate_handler)(void);

/* More than ten times as long as a process with torch takes to exit on a busy machine. */
enum { MAX_WAIT_S = 60 };
static terminate_handler before;

static void on_terminate(void) {
    int is_shutting_down = !Py_IsInitialized();
    int in_main_thread = syscall(SYS_gettid) == getpid();
    if (is_shutting_down && !in_main_thread) {
        struct timespec left = {.tv_sec = MAX_WAIT_S};
        while (nanosleep(&left, &left)) {}
    }
    if (before) before();
    abort();
}

static PyObject *outlive_threads(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    void *cpp = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    terminate_handler (*set_terminate)(terminate_handler) = NULL;
    if (cpp) *(void **)&set_terminate = dlsym(cpp, "_ZSt13set_terminatePFvvE");
    terminate_handler found = set_terminate ? set_terminate(on_terminate) : on_terminate;
    if (found == on_terminate) Py_RETURN_TRUE;
    before = found;
    Py_RETURN_FALSE;
}

static PyMethodDef functions[] = {
    {"outlive_threads", outlive_threads, METH_NOARGS, "Install the handler; return whether it was installed already."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "ddp.telemetry._ending",
                                        .m_doc = "Process exit without an abort.",
                                        .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit__ending(void) { return PyModule_Create(&definition); }
