"""Writes down everything a script can see of how it was started. First argument: where to."""

import gc
import inspect
import json
import locale
import multiprocessing
import os
import signal
import site
import sys
import threading
import traceback


def described():
    return "the source of a function of __main__"


def exception_text():
    try:
        raise ValueError("bad batch")
    except ValueError:
        return traceback.format_exc()


def open_descriptors():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            os.fstat(int(name))
        except OSError:  # the one that listed the folder
            continue
        if target.startswith("/memfd:ddp-stacks") and int(name) >= 256:
            continue  # where the interpreter writes stacks when it is asked: out of the way of scripts
        found.append(int(name))
    return sorted(found)


def process_status(*names):
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    said = {name: lines.get(name) for name in names}
    if said.get("SigCgt"):  # but for the real-time signal that asks for stacks
        said["SigCgt"] = f"{int(said['SigCgt'], 16) & ~(1 << 61):016x}"
    return said


def ignored_signals():
    mask = int(process_status("SigIgn")["SigIgn"], 16)
    return [number for number in range(1, 32) if mask >> (number - 1) & 1]


def stream(file):
    return {
        "name": file.name,
        "mode": file.mode,
        "encoding": file.encoding,
        "errors": file.errors,
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "tty": file.isatty(),
        "seekable": [file.seekable(), file.buffer.seekable()],
        "classes": [repr(type(part)) for part in (file, file.buffer, getattr(file.buffer, "raw", None))],
    }


def main_module():
    return {
        "name": __name__,
        "file": globals().get("__file__"),
        "doc": __doc__,
        "spec": None if __spec__ is None else [__spec__.name, __spec__.origin],
        "package": __package__,
        "loader": repr(__loader__).split(" object")[0].split("(")[0],
        "names": sorted(name for name in globals() if name.startswith("__")),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "source": inspect.getsource(described),
        "stack": [frame.function for frame in inspect.stack()],
        "exception": exception_text(),
    }


def interpreter():
    return {
        "argv": sys.argv[2:],
        "argv0": sys.argv[0],
        "orig_argv": [word for word in sys.orig_argv[1:] if word != sys.argv[1]],
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile())],
        "importers": importers(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "gc": [gc.get_threshold(), gc.isenabled(), len(gc.callbacks), gc.get_debug()],
        "no_bytecode": sys.dont_write_bytecode,
        "user_site": site.ENABLE_USER_SITE,
        "locale": locale.setlocale(locale.LC_ALL),
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
    }


def process():
    main = threading.main_thread()
    return {
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(),
        "descriptors": open_descriptors(),
        "cwd": os.getcwd(),
        "status": process_status("SigBlk", "SigCgt", "Umask", "Seccomp", "NoNewPrivs"),
        "ignored": ignored_signals(),
        "handlers": {one.name: repr(signal.getsignal(one)) for one in signal.Signals},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "wakeup": signal.set_wakeup_fd(-1),
        "main_thread": [threading.current_thread() is main, main.ident == threading.get_ident()],
        "native_id": main.native_id == os.getpid(),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process() is None],
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
    }


def importers():
    """All but the one that waits for torch in a rank that was executed, and is gone when torch has come."""
    names = [repr(finder).split(" object")[0] for finder in sys.meta_path]
    return [name for name in names if not name.endswith("script_start._Awaiting")]


def traces_of_launcher():
    """Names and paths of ours that a script could come upon."""
    loaded = [name for name in sys.modules if "ddp_launch" in name or name == "sitecustomize"]
    cached = [path for path in sys.path_importer_cache if path.endswith(("template", "hook"))]
    lines = sys.modules.get("linecache")
    sources = [] if lines is None else [path for path in lines.cache if "/launcher/template/" in path]
    # An editable installation puts a finder of its own name there, under every launcher.
    return [name for name in loaded if "__editable__" not in name] + cached + sources


def command_line():
    with open("/proc/self/cmdline") as file:
        return file.read().split("\0")[1:-1]


if __name__ == "__main__":
    facts = {
        "main": main_module(),
        "interpreter": interpreter(),
        "process": process(),
        "traces": traces_of_launcher(),
        "environment": dict(os.environ),
        "command_line": command_line(),
    }
    with open(f"{sys.argv[1]}.{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(facts, file, indent=1)
