"""What the interpreter is set to."""

import ast
import atexit
import codecs
import faulthandler
import gc
import inspect
import linecache
import locale
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import tracemalloc
import warnings
import weakref


def look():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": [sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.pycache_prefix],
        "names of sys": dict.fromkeys(dir(sys), "there"),
        "warnoptions": sys.warnoptions,
        "xoptions": {str(name): repr(value) for name, value in sys._xoptions.items()},
        "warnings": {_filter(each): "there" for each in warnings.filters},
        "order of warnings": [_filter(each) for each in warnings.filters],
        "hooks": _hooks(),
        "importers": [name_of(each) for each in sys.meta_path],
        "path hooks": [name_of(each) for each in sys.path_hooks],
        "path importers": {path: name_of(each) for path, each in sys.path_importer_cache.items()},
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()],
        "gc": [gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.get_freeze_count() > 0],
        "gc callbacks": [name_of(each) for each in gc.callbacks],
        "at exit": atexit._ncallbacks(),
        "finalizers at exit": sum(each.atexit for each in weakref.finalize._registry.values()),
        "thread exits": len(threading._threading_atexits),
        "fault handler": [faulthandler.is_enabled(), tracemalloc.is_tracing()],
        "handlers": {each.name: name_of(signal.getsignal(each)) for each in signal.Signals},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "wakeup": _wakeup(),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), locale.getlocale()],
        "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "codecs": codecs.lookup("utf-8").name,
        "streams": {name: _stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
        "streams are the first": [
            getattr(sys, each) is getattr(sys, f"__{each}__") for each in ("stdin", "stdout")
        ],
        "time zone": [time.tzname, time.timezone, time.daylight],
        "process time is small": time.process_time() < 20.0,
        "main": _main(),
        "threads": sorted(
            f"{type(each).__qualname__} {each.name} {each.daemon}" for each in threading.enumerate()
        ),
        "main thread": _main_thread(),
        "site": [site.ENABLE_USER_SITE, site.USER_SITE, site.USER_BASE],
        "cached lines": dict.fromkeys(linecache.cache, "cached"),
        "optimized": [__debug__, sys.dont_write_bytecode, sysconfig.get_default_scheme()],
        "tools": _tools(),
        "no error before": [sys.exc_info()[0], hasattr(sys, "last_type"), hasattr(sys, "last_value")],
    }


def name_of(value):
    """A name for a function, class or object, without its address."""
    if not hasattr(value, "__qualname__"):
        value = type(value) if not isinstance(value, (int, str, type(None))) else value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if name else repr(value)


def _filter(entry):
    action, message, category, module, line = entry
    pattern, where = getattr(message, "pattern", message), getattr(module, "pattern", module)
    return f"{action} {name_of(category)} {pattern} {where} {line}"


def _hooks():
    found = {
        name: name_of(getattr(sys, name))
        for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    }
    found |= {"trace": name_of(sys.gettrace()), "profile": name_of(sys.getprofile())}
    found |= {"thread": name_of(threading.excepthook), "warning": name_of(warnings.showwarning)}
    found |= {
        "thread trace": name_of(threading.gettrace()),
        "thread profile": name_of(threading.getprofile()),
    }
    found |= {"import": name_of(__import__), "open": name_of(open), "print": name_of(print)}
    return found | {"coroutines": repr(sys.get_coroutine_origin_tracking_depth())}


def _wakeup():
    number = signal.set_wakeup_fd(-1)
    if number >= 0:
        signal.set_wakeup_fd(number)
    return number


def _stream(file):
    if file is None:
        return None
    buffer = getattr(file, "buffer", None)
    found = {
        name: getattr(file, name, None)
        for name in (
            "name",
            "mode",
            "encoding",
            "errors",
            "newlines",
            "line_buffering",
            "write_through",
            "closed",
        )
    }
    found |= {"terminal": file.isatty(), "seekable": file.seekable(), "fileno": file.fileno()}
    return found | {"classes": [name_of(type(each)) for each in (file, buffer, getattr(buffer, "raw", None))]}


def _main():
    main = sys.modules["__main__"]
    spec, loader = main.__spec__, main.__loader__
    frame = sys._getframe()
    outer = [frame.f_code.co_name]
    while frame.f_back is not None:
        frame = frame.f_back
        outer.append(frame.f_code.co_filename if frame.f_globals is vars(main) else frame.f_code.co_name)
    return {
        "special names": {name: "there" for name in vars(main) if name.startswith("__")},
        "file": getattr(main, "__file__", None),
        "cached": getattr(main, "__cached__", None),
        "doc": main.__doc__,
        "package": main.__package__,
        "spec": spec and [spec.name, spec.origin, name_of(spec.loader), spec.cached, spec.parent],
        "loader": [name_of(loader), getattr(loader, "name", None), getattr(loader, "path", None)],
        "builtins": name_of(type(main.__builtins__)),
        "frames": [each for each in outer if "importlib" not in each and not each.startswith("_")],
        "code": _code_flags(main),
    }


def _code_flags(main):
    """Flags of the compiler that are in force: `from __future__ import annotations` of ours must not reach a script."""
    del main
    return [compile("1", "text", "exec", dont_inherit=True).co_flags, ast.PyCF_ONLY_AST, inspect.CO_OPTIMIZED]


def _main_thread():
    main = threading.main_thread()
    return [
        threading.current_thread() is main,
        main.ident == threading.get_ident(),
        main.native_id == os.getpid(),
        threading.get_native_id() == os.getpid(),
        main.name,
        main.daemon,
        threading.stack_size(),
    ]


def _tools():
    monitoring = getattr(sys, "monitoring", None)
    return monitoring and [monitoring.get_tool(number) for number in range(6)]
