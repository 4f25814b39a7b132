"""What each process draws for itself. Two ranks must not draw the same, unless they do so in fresh interpreters."""

import ctypes
import os
import random
import secrets
import sys
import tempfile
import uuid


def look():
    import torch

    numpy = sys.modules.get("numpy")
    current = sys.modules["multiprocessing.process"].current_process()
    drawn = {
        "random": random.random(),
        "another random": random.Random().random(),
        "system": random.SystemRandom().random(),
        "secret": secrets.token_hex(8),
        "uuid": str(uuid.uuid4()),
        "uuid with time": str(uuid.uuid1()),
        "file": tempfile.mktemp(),
        "key": bytes(current.authkey).hex(),
        "torch seed": torch.initial_seed(),
        "torch": torch.rand(1).item(),
        "hash": hash("a word"),
        "address": ctypes.cast(ctypes.CDLL(None).getenv, ctypes.c_void_p).value,
        "process": os.getpid(),
    }
    if numpy is not None:
        drawn["numpy"] = numpy.random.rand()
        drawn["numpy generator"] = numpy.random.default_rng().random()
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is random.Random:
                drawn[f"{name}.{key}"] = value.random()
    drawn |= _locks()
    return {name: str(value) for name, value in drawn.items()}


def _locks():
    """Locks that a module of the script has made for its process, by the file that holds the semaphore."""
    with open("/proc/self/maps") as file:
        mapped = [line.split() for line in file if "/sem." in line]
    found = {}
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if type(value).__module__ == "multiprocessing.synchronize" and hasattr(value, "_semlock"):
                found[f"lock {name}.{key}"] = _file_at(value._semlock.handle, mapped)
    return found


def _file_at(address, mapped):
    for words in mapped:
        first, last = (int(each, 16) for each in words[0].split("-"))
        if first <= address < last:
            return f"{words[4]} {words[5]}"
    return None
