/* The end of an interpreter whose process has threads of C++.
 *
 * A thread of Gloo that lets go of the last reference to a tensor wants the GIL. Once the interpreter has begun to end,
 * Python before 3.14 answers with pthread_exit; that unwinds through destructors which may not throw, and C++ ends the
 * process: "terminate called without an active exception", exit by SIGABRT, of a rank that had finished its work. Such
 * a thread waits here instead, for the process to be gone. If it is not gone in time, perhaps because it waits for
 * this thread, what would have happened happens. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*terminate_handler)(void);

/* Ten times and more of what the end of a process with torch takes on a busy machine. */
enum { PATIENCE_S = 60 };
static terminate_handler before;

static void on_terminate(void) {
    int on_the_way_out = !Py_IsInitialized();
    int in_main_thread = syscall(SYS_gettid) == getpid();
    if (on_the_way_out && !in_main_thread) {
        struct timespec left = {.tv_sec = PATIENCE_S};
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
    {"outlive_threads", outlive_threads, METH_NOARGS, "C++ waits for the end from now on; whether it did before."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "ddp.telemetry._ending",
                                        .m_doc = "An end without an abort.",
                                        .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit__ending(void) { return PyModule_Create(&definition); }
