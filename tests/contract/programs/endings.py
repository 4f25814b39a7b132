"""Ends in the way that $ENDING names."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time

endings = {}


def ending(function):
    endings[function.__name__] = function
    return function


@ending
def falls_off_the_end():
    pass


@ending
def exit_none():
    sys.exit(None)


@ending
def exit_zero():
    sys.exit(0)


@ending
def exit_three():
    sys.exit(3)


@ending
def exit_true():
    sys.exit(True)


@ending
def exit_text():
    sys.exit("no data here")


@ending
def exit_object():
    sys.exit(("a", 1))


@ending
def exit_beyond_a_byte():
    sys.exit(256 + 7)


@ending
def exit_negative():
    sys.exit(-1)


@ending
def exit_beyond_an_int():
    sys.exit(2**80)


@ending
def leaves_at_once():
    sys.stdout.write("lost? no: -u")
    os._exit(9)


@ending
def uncaught():
    raise ValueError("bad batch")


@ending
def chained():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise RuntimeError("second") from error


@ending
def group():
    raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])


@ending
def interrupted():
    raise KeyboardInterrupt


@ending
def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@ending
def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@ending
def aborted():
    os.abort()


@ending
def broken_pipe_is_an_exception():
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")


@ending
def at_exit_in_reverse_order():
    atexit.register(print, "registered first")
    atexit.register(print, "registered second")
    sys.exit(4)


@ending
def exception_at_exit():
    def fails():
        raise ValueError("too late")

    atexit.register(print, "still called")
    atexit.register(fails)


@ending
def exit_at_exit():
    atexit.register(sys.exit, 5)


@ending
def excepthook():
    sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error)
    raise ValueError("bad batch")


class Mourned:
    def __del__(self):
        print("finalized", threading is not None)


@ending
def finalizer_of_a_global():
    global kept
    kept = Mourned()


@ending
def finalizer_in_a_cycle_imports():
    import torch  # noqa: F401  (so that it is not the finalizer that imports it first)

    class Cycle:
        def __del__(self):
            import torch.nn.functional

            print("imported", torch.nn.functional.__name__)

    one = Cycle()
    one.itself = one


@ending
def waits_for_its_threads():
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread done"))).start()
    print("main done")
    sys.exit(6)


@ending
def leaves_daemon_threads():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    busy = threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True)
    busy.start()
    sys.exit(8)


@ending
def c_output_is_flushed():
    ctypes.CDLL(None).printf(b"from C, without a newline")
    sys.exit(7)


@ending
def cpp_output_is_flushed():
    import torch  # noqa: F401  (brings the C++ library)

    cpp = ctypes.CDLL("libstdc++.so.6")
    cpp._ZNSt8ios_base15sync_with_stdioEb(False)
    cout = ctypes.byref(ctypes.c_char.in_dll(cpp, "_ZSt4cout"))
    cpp._ZNSo5writeEPKcl.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_long]
    cpp._ZNSo5writeEPKcl(ctypes.cast(cout, ctypes.c_void_p), b"from C++", 8)
    sys.exit(7)


@ending
def c_exit_functions_of_the_script_run():
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"registered with C")), None)
    sys.exit(7)


@ending
def c_exit():
    ctypes.CDLL(None).printf(b"from C")
    ctypes.CDLL(None).exit(11)


@ending
def forked_child_exits():
    if os.fork() == 0:
        ctypes.CDLL(None).printf(b"child ")
        sys.exit(12)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print("child's code", code)
    sys.exit(13)


@ending
def much_output_and_out():
    sys.stdout.write("x" * (1 << 20) + "\n" + "partial")
    sys.exit(2)


@ending
def logging_at_exit():
    import logging

    logging.basicConfig(format="%(message)s")
    atexit.register(logging.warning, "logged late")


@ending
def temporary_folder_is_removed():
    import tempfile

    global folder
    folder = tempfile.TemporaryDirectory()
    atexit.register(lambda: print("there:", os.path.isdir(folder.name)))
    import weakref

    weakref.finalize(folder, lambda: None)


@ending
def executor_is_joined():
    from concurrent.futures import ThreadPoolExecutor

    ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), print("task done")))


@ending
def async_main():
    import asyncio

    async def main():
        await asyncio.sleep(0)
        sys.exit(14)

    asyncio.run(main())


if __name__ == "__main__":
    endings[os.environ["ENDING"]]()
