"""How a rank of a random program ends, well or badly, and what its peers do meanwhile."""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    text: str
    needs_torch: bool = False
    in_restart: bool = True


WELL = (
    "pass",
    "sys.exit()",
    "sys.exit(0)",
    "sys.exit(None)",
    "sys.exit(False)",
    "os._exit(0)",
    "raise SystemExit",
    "raise SystemExit(256)",
    "exit()",
    "import atexit; atexit.register(print, 'WORD', RANK)",
    "import atexit; atexit.register(lambda: 1 / 0)",
    "import atexit; atexit.register(lambda: sys.exit(4))",
    "import threading; threading.Thread(target=lambda: (time.sleep(0.1), print('WORD', RANK))).start()",
    "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "sys.stdout.flush(); os.execv(sys.executable, [sys.executable, '-c', 'print(\"WORD\")'])",
    "os.execvp('sh', ['sh', '-c', 'echo WORD; exit 0'])",
    "class Late:\n    def __del__(self): print('WORD', RANK)\nlate = Late()",
    "class Late:\n    def __del__(self): 1 / 0\nlate = Late()",
    "try: raise KeyError('WORD')\nfinally: os._exit(0)",
    "import signal; signal.signal(signal.SIGALRM, lambda n, f: sys.exit(0)); signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(60)",
    "import weakref, threading; keep = threading.Event(); weakref.finalize(keep, print, 'WORD', RANK)",
    "import gc; gc.disable(); cycle = []; cycle.append(cycle)",
    "import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); import atexit; atexit.register(print, 'WORD', RANK)",
    "import concurrent.futures; pool = concurrent.futures.ThreadPoolExecutor(2); pool.submit(time.sleep, 0.1)",
    "import subprocess, atexit; child = subprocess.Popen(['sleep', '600']); atexit.register(child.kill)",
    "import atexit, threading; last = threading.Thread(target=print); atexit.register(lambda: (last.start(), last.join()))",
    "import faulthandler; faulthandler.enable(); sys.exit(0)",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "os.closerange(0, 64); os._exit(0)",
    "import runpy; open(f'{HERE}/WORD_{RANK}.py', 'w').write('import sys; sys.exit(0)'); runpy.run_path(f'{HERE}/WORD_{RANK}.py', run_name='__main__')",
)
# Rank 0 leaves while the others work. Nothing may follow: they would wait for it forever.
WELL_WITH_TORCH = (
    "import torch.distributed as dist\ndist.init_process_group('gloo'); dist.barrier()\nif RANK == 0: print('WORD'); sys.stdout.flush(); os._exit(0)\ntime.sleep(0.5)",
)
BADLY = (
    "sys.exit('')",
    "sys.exit([])",
    "sys.exit(1.5)",
    "sys.exit(b'WORD')",
    "sys.exit(2**40 + 5)",
    "sys.exit({'WORD': 1})",
    "class Odd:\n    def __str__(self): return 'WORD odd'\nsys.exit(Odd())",
    "class Odd:\n    def __str__(self): raise ValueError('WORD')\nsys.exit(Odd())",
    "import faulthandler; faulthandler.enable(); os.abort()",
    "import faulthandler; faulthandler.dump_traceback_later(0.05, exit=True); time.sleep(60)",
    "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
    "os.kill(os.getpid(), 14); time.sleep(60)",
    "os.kill(os.getpid(), 13); print('WORD'); sys.exit(23)",
    "import threading; threading.Thread(target=lambda: (time.sleep(0.05), os.kill(os.getpid(), 15))).start(); time.sleep(60)",
    "import atexit; atexit.register(lambda: os.kill(os.getpid(), 9))",
    "import builtins; builtins.__import__ = None\nimport json",
    "raise SystemExit(os.strerror(2))",
    "import logging; logging.critical('WORD'); sys.exit(24)",
    "import subprocess; sys.exit(subprocess.run(['sh', '-c', 'exit 25']).returncode)",
    "os.kill(os.getppid(), 15); time.sleep(60)",
    "import signal; signal.signal(signal.SIGTERM, lambda n, f: (print('WORD', RANK), sys.exit(0))); os.kill(os.getppid(), 15); time.sleep(60)",
    "import subprocess; subprocess.run(['kill', str(os.getppid())]); time.sleep(60)",
    "sys.exit(1)",
    "sys.exit(3)",
    "sys.exit(True)",
    "sys.exit('WORD is wrong')",
    "sys.exit(('WORD', 2))",
    "sys.exit(-1)",
    "sys.exit(300)",
    "os._exit(4)",
    "os._exit(255)",
    "raise ValueError('WORD')",
    "raise KeyError('WORD')",
    "raise KeyboardInterrupt",
    "raise Exception",
    "raise BaseException('WORD')",
    "raise ConnectionResetError(104, 'Connection reset by peer')",
    "raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')",
    "raise MemoryError",
    "raise GeneratorExit",
    "class Stop(SystemExit): pass\nraise Stop(5)",
    "class Stop(SystemExit):\n    code = 6\n    def __init__(self): pass\nraise Stop",
    "class Bad(Exception):\n    def __str__(self): raise ValueError('WORD')\nraise Bad",
    "raise ExceptionGroup('WORD', [ValueError(1), KeyError(2)])",
    "try: 1 / 0\nexcept ZeroDivisionError as error: raise RuntimeError('WORD') from error",
    "try: 1 / 0\nfinally: sys.exit(7)",
    "try: sys.exit(8)\nfinally: raise OSError('WORD')",
    "assert RANK is None, 'WORD'",
    "import WORD_missing",
    "exec('def broken(:')",
    "def deep(): deep()\nsys.setrecursionlimit(60)\ndeep()",
    "raise ValueError('é 漢字 WORD\\nand more\\n\\n')",
    "os.abort()",
    "os.kill(os.getpid(), 9)",
    "os.kill(os.getpid(), 15); time.sleep(60)",
    "os.kill(os.getpid(), 2); time.sleep(60)",
    "os.kill(os.getpid(), 11); time.sleep(60)",
    "os.kill(os.getpid(), 10); time.sleep(60)",
    "import signal; signal.alarm(1); time.sleep(60)",
    "import ctypes; ctypes.string_at(0)",
    "import signal\ndef on(n, f): raise RuntimeError('WORD')\nsignal.signal(signal.SIGTERM, on); os.kill(os.getpid(), 15); time.sleep(60)",
    "import signal; signal.signal(signal.SIGTERM, lambda n, f: sys.exit(9)); os.kill(os.getpid(), 15); time.sleep(60)",
    "import atexit; atexit.register(lambda: os._exit(6))",
    "import atexit; atexit.register(print, 'WORD', RANK); sys.exit(2)",
    "import threading; threading.Thread(target=os._exit, args=(11,)).start(); time.sleep(60)",
    "import threading; threading.Timer(0.05, lambda: os.kill(os.getpid(), 9)).start()",
    "sys.excepthook = lambda *about: print('WORD', RANK, about[0].__name__)\nraise LookupError",
    "sys.excepthook = lambda *about: os._exit(12)\nraise LookupError",
    "sys.stdout.flush(); os.execvp('sh', ['sh', '-c', 'echo WORD; exit 13'])",
    "os.execvp('sh', ['sh', '-c', 'kill -9 $$'])",
    "print('Traceback (most recent call last):\\n  File \"a.py\", line 1, in <module>\\nKeyError: 1', file=sys.stderr); sys.exit(14)",
    "sys.stderr.write('WORD'); sys.exit(15)",
    "sys.stderr.close(); sys.exit(16)",
    "sys.stderr.close(); raise ValueError('WORD')",
    "os.close(2); raise ValueError('WORD')",
    "os.close(1); print('WORD'); sys.exit(17)",
    "import subprocess; subprocess.run(['sh', '-c', 'exit 18'], check=True)",
    "import subprocess; subprocess.Popen(['sleep', '600']); sys.exit(19)",
    "pid = os.fork()\nif pid == 0: os.kill(os.getppid(), 9); os._exit(0)\ntime.sleep(60)",
    "import asyncio\nasync def go(): raise ValueError('WORD')\nasyncio.run(go())",
)
BADLY_WITH_TORCH = (
    "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): raise ValueError('WORD')\nmain()",
    "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): sys.exit(21)\nmain()",
    "import torch; torch.ones(2) @ torch.ones(3)",
    "import torch.distributed as dist; dist.is_initialized() or dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); sys.exit(22)",
)
# While one rank fails, the others ...
PEERS = (
    "time.sleep(60)",
    "import signal; signal.pause()",
    "import signal; signal.signal(signal.SIGTERM, lambda n, f: sys.exit(0)); told(); time.sleep(60)",
    "import signal; signal.signal(signal.SIGTERM, lambda n, f: sys.exit(31)); told(); time.sleep(60)",
    "import subprocess; subprocess.run(['sleep', '60'])",
    "import threading; threading.Event().wait()",
    "while True: time.sleep(0.01)",
    "LEAVES",  # they have ended well before
)
# ... with last words of their own.
LOUD_PEERS = (
    "import signal; signal.signal(signal.SIGTERM, lambda n, f: (print('WORD', RANK), os._exit(32))); told(); time.sleep(60)",
    "import signal\ndef on(n, f): raise RuntimeError('WORD')\nsignal.signal(signal.SIGTERM, on); told(); time.sleep(60)",
    "import signal\ndef on(n, f): raise KeyboardInterrupt\nsignal.signal(signal.SIGTERM, on); told(); time.sleep(60)",
)
