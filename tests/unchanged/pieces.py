"""The statements that random programs are made of: each is short, ends by itself, and does the same in every run.

WORD stands for a random word. A piece that prints less than a line, or that needs torch, says so.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    text: str
    needs_torch: bool = False
    is_alone: bool = False  # changes the streams or descriptors: the last statement before the end


def _pieces(*texts: str, **what: bool) -> tuple[Piece, ...]:
    return tuple(Piece(text.strip("\n"), **what) for text in texts)


OUTPUT = _pieces(
    'print("WORD", RANK)',
    'print("WORD", RANK, file=sys.stderr)',
    'print("WORD\\n\\nWORD", RANK, flush=True)',
    'print("é ü 漢字 🙂 WORD", RANK)',
    'print("\\x1b[31mWORD\\x1b[0m\\tand", RANK)',
    'print("WORD  trailing  ", RANK, "  ")',
    'print("ddp-launch: WORD", RANK)',
    'print("x" * 60_000, "WORD", RANK)',
    'for i in range(150): print("WORD", RANK, i)',
    'for i in range(60): print("WORD", RANK, i, file=sys.stderr)',
    'os.write(1, b"WORD %d\\n" % RANK)',
    'os.write(2, b"WORD %d\\n" % RANK)',
    'sys.stdout.buffer.write(b"WORD \\xff\\xfe\\x80 %d\\n" % RANK); sys.stdout.flush()',
    'sys.stdout.write("WORD"); sys.stdout.write(f" {RANK}\\n")',
    'sys.stderr.writelines(["WORD\\n", f"{RANK}\\n"])',
    'import logging; logging.warning("WORD %d", RANK)',
    'import logging; logging.basicConfig(level="INFO", stream=sys.stdout); logging.info("WORD %d", RANK)',
    'import warnings; warnings.warn(f"WORD {RANK}")',
    'import warnings; warnings.warn(f"WORD {RANK}", DeprecationWarning)',
    'import traceback\ntry:\n    {}["WORD"]\nexcept KeyError:\n    traceback.print_exc()',
    'try:\n    {}["WORD"]\nexcept KeyError as error:\n    import logging; logging.exception("WORD %s", error)',
    'import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as to:\n    print("WORD")\nprint(repr(to.getvalue()), RANK)',
    'saved = os.dup(1); sink = os.open(os.devnull, os.O_WRONLY); os.dup2(sink, 1); print("lost"); os.dup2(saved, 1); print("WORD", RANK)',
    'import pprint; pprint.pprint({"WORD": [RANK] * 3})',
    "import faulthandler; faulthandler.dump_traceback(all_threads=False)",
    "import faulthandler; faulthandler.dump_traceback_later(0.02, file=sys.stderr); time.sleep(0.2); faulthandler.cancel_dump_traceback_later()",
    'sys.stdout.reconfigure(encoding="latin-1"); print("WORD é", RANK); sys.stdout.reconfigure(encoding="utf-8")',
    'sys.stdout.reconfigure(line_buffering=False, write_through=False); print("WORD", RANK); print("WORD")',
    'try:\n    sys.stdout.reconfigure(encoding="ascii", errors="strict"); print("é")\nexcept UnicodeEncodeError as error:\n    sys.stdout.reconfigure(encoding="utf-8"); print("WORD", RANK, error)',
    'import warnings; warnings.simplefilter("error")\ntry: warnings.warn("WORD")\nexcept UserWarning as error: print(RANK, error)\nwarnings.resetwarnings()',
    'import gc\nclass Bad:\n    def __del__(self): raise ValueError("WORD")\nbad = Bad(); del bad; print("WORD", RANK)',
    'import contextlib\nwith contextlib.suppress(BrokenPipeError):\n    r, w = os.pipe(); os.close(r); os.write(w, b"x")\nprint("WORD", RANK)',
    'class Half:\n    def __del__(self): print("WORD", RANK)\nhalf = Half(); del half',
)
PARTIAL = _pieces(
    'sys.stdout.write("x" * 300_000 + "WORD")',
    'sys.stdout.write(("WORD" * 9 + "\\r") * 2_000); sys.stdout.flush()',
    "os.write(1, bytes(range(256)) * 200)",
    'open(1, "wb", buffering=0, closefd=False).write(bytes(range(255, -1, -1)) * 64)',
    'print("WORD", RANK, end="")',
    'print("WORD", RANK, end="", file=sys.stderr)',
    'os.write(1, b"WORD %d" % RANK)',
    'print("10%\\r50%\\r100% WORD", RANK)',
    'print("WORD", RANK, end="\\r", flush=True)',
)
# What a program can see of how it was started.
FACTS = _pieces(
    "print(RANK, __name__, __spec__ and __spec__.name, __package__, __doc__)",
    'print(RANK, globals().get("__file__"), sys.argv)',
    "print(RANK, sys.path[0], os.getcwd())",
    "print(RANK, sys.path)",
    "print(RANK, sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)",
    "print(RANK, sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())",
    "print(RANK, sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through)",
    'print(RANK, [os.environ.get(n) for n in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")])',
    'print(RANK, [os.environ.get(n) for n in ("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS")])',
    'print(RANK, [os.environ.get(n) for n in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")])',
    'for name in sorted(os.environ): print(RANK, name) if not name.startswith("DDP_") else None',
    'print(RANK, bool(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"]) > 0, bool(os.environ["TORCHELASTIC_RUN_ID"]))',
    "import signal; print(RANK, [str(signal.getsignal(s)) for s in (2, 3, 1, 15, 10, 12, 13, 14, 17)], signal.pthread_sigmask(0, []))",
    "print(RANK, os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), oct(os.umask(0o22)))",
    "import gc; print(RANK, gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.get_debug())",
    "import locale; print(RANK, locale.setlocale(locale.LC_ALL), locale.getpreferredencoding())",
    "import multiprocessing as mp; print(RANK, mp.get_start_method(allow_none=True), mp.current_process().name, mp.parent_process())",
    "print(RANK, sys.getrecursionlimit(), sys.getswitchinterval())",
    "print(RANK, sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile())",
    "import random; random.seed(7); print(RANK, random.random())",
    "import decimal, socket; print(RANK, decimal.getcontext().prec, socket.getdefaulttimeout())",
    "import inspect; print(RANK, len(inspect.stack()), sys._getframe().f_back)",
    'import __main__; print(RANK, __main__.__dict__ is globals(), sorted(n for n in globals() if n.startswith("__")))',
    "import tempfile; print(RANK, tempfile.gettempdir() == os.environ.get('TMPDIR'))",
    'print(RANK, sorted(n for n in dir(__builtins__) if n[0].islower() and not n.startswith("_")))',
    "print(RANK, sorted(sys.modules) == sorted(set(sys.modules)), 'WORD' in sys.modules, 'json.tool' in sys.modules)",
)
# What the import of torch changes, and its threads: a warm rank has imported it before the script does.
FACTS_BESIDE_TORCH = _pieces(
    "import warnings; print(RANK, [f[:1] + f[2:3] for f in warnings.filters])",
    "import threading; print(RANK, [t.name for t in threading.enumerate()], threading.current_thread() is threading.main_thread())",
    "import signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); signal.pthread_kill(threading.get_ident(), signal.SIGUSR2); print('WORD', RANK, signal.sigwait([signal.SIGUSR2]))",
)
THREADS = _pieces(
    "import threading\nt = threading.Thread(target=print, args=('WORD', RANK)); t.start(); t.join()",
    "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='WORD'); t.start(); t.join()",
    "import threading\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start(); print('WORD', RANK)",
    "import threading\nt = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join(); print('WORD', RANK)",
    "import threading\nt = threading.Timer(0.01, print, ('WORD', RANK)); t.start(); t.join()",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as pool: print('WORD', RANK, list(pool.map(str.upper, 'abc')))",
    "import threading\nthreading.excepthook = lambda e: print('WORD', RANK, e.exc_type.__name__)\nt = threading.Thread(target=lambda: [].pop()); t.start(); t.join()",
    "import asyncio\nasync def go(): await asyncio.sleep(0.01); print('WORD', RANK)\nasyncio.run(go())",
)
SIGNALS = _pieces(
    "import signal\nsignal.signal(signal.SIGUSR1, lambda n, f: print('WORD', RANK, n)); os.kill(os.getpid(), signal.SIGUSR1)",
    "import signal\nsignal.signal(signal.SIGALRM, lambda n, f: print('WORD', RANK)); signal.alarm(1); signal.pause()",
    "import signal\nsignal.signal(signal.SIGALRM, lambda n, f: None); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); signal.pause(); signal.setitimer(signal.ITIMER_REAL, 0); print('WORD', RANK)",
    "import signal\nsignal.signal(signal.SIGTERM, lambda n, f: print('WORD', RANK)); os.kill(os.getpid(), signal.SIGTERM); signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "try:\n    import signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\nexcept KeyboardInterrupt:\n    print('WORD', RANK)",
    "import signal\ndef on(n, f): raise ValueError('WORD')\nsignal.signal(signal.SIGUSR1, on)\ntry: os.kill(os.getpid(), signal.SIGUSR1); time.sleep(1)\nexcept ValueError as error: print(RANK, error)",
    "import signal, subprocess\nsignal.signal(signal.SIGCHLD, lambda n, f: print('WORD', RANK)); subprocess.run(['true']); signal.signal(signal.SIGCHLD, signal.SIG_DFL)",
    "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL); signal.signal(signal.SIGHUP, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGHUP); print('WORD', RANK)",
    "import signal, subprocess\nchild = subprocess.Popen(['sh', '-c', f'sleep 0.1; kill -CONT {os.getpid()}']); os.kill(os.getpid(), signal.SIGSTOP); print('WORD', RANK); child.wait()",
)
CHILDREN = _pieces(
    "import subprocess; print(RANK, subprocess.run(['sh', '-c', 'cat; echo WORD'], input=b'x', capture_output=True).stdout)",
    "import subprocess\ntry: subprocess.run(['sleep', '60'], timeout=0.05)\nexcept subprocess.TimeoutExpired: print('WORD', RANK)",
    "import pty; pid, fd = pty.fork()\nif pid == 0: os.execvp('sh', ['sh', '-c', 'tty >/dev/null && echo WORD'])\nprint(RANK, os.read(fd, 99)); os.waitpid(pid, 0); os.close(fd)",
    "import subprocess; subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; sleep 600'])",
    "import subprocess; print(RANK, subprocess.run([sys.executable, '-m', 'launcher', '--nproc-per-node', '2', '--no-python', 'sh', '-c', 'exec 2>&1; echo WORD $RANK $WORLD_SIZE $LOCAL_RANK > /dev/null; exit 0'], capture_output=True).returncode)",
    "import subprocess; print(RANK, subprocess.run([sys.executable, '-m', 'launcher', '--nproc-per-node', '1', '--no-python', 'sh', '-c', 'exit 7'], capture_output=True, env={**os.environ, 'TORCHELASTIC_ERROR_FILE': ''}).returncode)",
    "pid = os.fork()\nif pid == 0: print('WORD child', RANK); sys.stdout.flush(); os._exit(3)\nprint('WORD', RANK, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "pid = os.fork()\nif pid == 0: sys.exit(9)\nprint('WORD', RANK, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "try: os.waitpid(os.getpid(), 0)\nexcept ChildProcessError: print('WORD', RANK)",
    "import subprocess; print('WORD', RANK, subprocess.run(['sh', '-c', 'echo WORD; echo WORD >&2; exit 4']).returncode)",
    "import subprocess; print(RANK, subprocess.run(['sh', '-c', 'echo WORD; kill -9 $$'], capture_output=True).returncode)",
    "os.system('echo WORD $RANK of $WORLD_SIZE')",
    "import subprocess; subprocess.run([sys.executable, '-c', 'import os, sys; print(\"WORD\", os.environ[\"RANK\"], sys.path[1:], sys.flags)'])",
    "import subprocess; subprocess.Popen(['sleep', '600'])",
    "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "pid = os.fork()\nif pid == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nos.waitpid(pid, 0)",
    "pid = os.fork()\nif pid == 0: time.sleep(600)\nos.kill(pid, 9); print('WORD', RANK, os.waitpid(pid, 0)[1])",
    "import multiprocessing as mp\np = mp.get_context('fork').Process(target=print, args=('WORD', RANK)); p.start(); p.join(); print(p.exitcode)",
    "import multiprocessing as mp\np = mp.get_context('fork').Process(target=sys.exit, args=(6,)); p.start(); p.join(); print(p.exitcode)",
    "import multiprocessing as mp\nmp.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True).start(); print('WORD')",
    "import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool: print('WORD', RANK, pool.map(abs, [-1, 2, -3]))",
    "from concurrent.futures import ProcessPoolExecutor\nwith ProcessPoolExecutor(2) as pool: print('WORD', RANK, list(pool.map(len, ['a', 'bb'])))",
    "with os.popen('echo WORD; exit 3') as found: print(RANK, found.read())",
    "pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 5'], os.environ); print('WORD', RANK, os.waitpid(pid, 0)[1])",
)
# A child that runs the script again: its body is under `if __name__ == "__main__"` there.
SPAWNING = _pieces(
    "import multiprocessing as mp\np = mp.get_context('spawn').Process(target=print, args=('WORD', RANK)); p.start(); p.join(); print(p.exitcode)",
    "import multiprocessing as mp\np = mp.get_context('forkserver').Process(target=print, args=('WORD', RANK)); p.start(); p.join(); print(p.exitcode)",
    "import multiprocessing as mp\nwith mp.get_context('spawn').Pool(1) as pool: print('WORD', RANK, pool.map(abs, [-1, 2]))",
)
FILES = _pieces(
    "os.mkfifo(f'WORD.{RANK}'); import threading\nthreading.Thread(target=lambda: open(f'WORD.{RANK}', 'w').write('WORD')).start(); print(RANK, open(f'WORD.{RANK}').read()); os.unlink(f'WORD.{RANK}')",
    "import socket\nserver = socket.socket(socket.AF_UNIX); server.bind(f'WORD.{RANK}.sock'); server.listen(); client = socket.socket(socket.AF_UNIX); client.connect(f'WORD.{RANK}.sock'); client.sendall(b'WORD'); print(RANK, server.accept()[0].recv(9)); os.unlink(f'WORD.{RANK}.sock')",
    "import socket\nserver = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname()); client.close(); print('WORD', RANK, server.accept()[0].recv(9))",
    "import sqlite3; base = sqlite3.connect(f'WORD.{RANK}.db'); base.execute('create table t (a)'); base.commit(); print(RANK, base.execute('select count(*) from t').fetchall()); base.close(); os.unlink(f'WORD.{RANK}.db')",
    "import fcntl\nwith open(f'{HERE}/WORD.lock', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX); print('WORD', RANK)",
    "import mmap; memory = mmap.mmap(-1, 4096); memory[:4] = b'WORD'[:4]; print(RANK, memory[:4])",
    "from multiprocessing import shared_memory; block = shared_memory.SharedMemory(create=True, size=64); block.buf[0] = 7; print('WORD', RANK, block.buf[0]); block.close(); block.unlink()",
    "print(RANK, os.get_inheritable(0), os.fstat(0).st_mode >> 12, sys.stdin.encoding, sys.stdin.errors)",
    "print(RANK, sys.stdin.buffer.read() if RANK == 0 else '')",
    "import select; print(RANK, select.select([sys.stdin], [], [], 5)[0] == [sys.stdin] if RANK == 0 else '')",
    "import tempfile\nwith tempfile.NamedTemporaryFile() as file: file.write(b'WORD'); print('WORD', RANK)",
    "import tempfile\nwith tempfile.TemporaryDirectory() as at: open(at + '/WORD', 'w').close(); print(RANK, os.listdir(at))",
    "os.makedirs(f'WORD.{RANK}/sub'); open(f'WORD.{RANK}/sub/file', 'w').write('WORD')",
    "open(f'WORD.{RANK}', 'a').write(TRY + 'WORD\\n')",
    "os.mkdir(f'{HERE}/WORD.{RANK}.{TRY}'); os.chdir(f'{HERE}/WORD.{RANK}.{TRY}'); open('file', 'w').close(); print(os.getcwd())",
    "import json; json.dump({'WORD': RANK}, open(f'{HERE}/WORD.{RANK}.json', 'w'))",
    "print(RANK, repr(sys.stdin.read()) if RANK == 0 else '')",
    "if RANK == 0:\n    for line in sys.stdin: print('WORD', line.strip())",
    "try: print(RANK, input() if RANK == 0 else '')\nexcept EOFError: print('WORD', RANK)",
    "os.environ['WORD'] = 'WORD'; os.system('echo $WORD $RANK')",
    "import importlib; sys.path.insert(0, HERE); open(f'{HERE}/WORD_{RANK}.py', 'w').write('print(__name__)'); importlib.invalidate_caches(); importlib.import_module(f'WORD_{RANK}')",
    "import socket; a, b = socket.socketpair(); a.send(b'WORD'); print(RANK, b.recv(9))",
    "os.umask(0o77); open(f'{HERE}/WORD.{RANK}.mode', 'w').close(); print(oct(os.stat(f'{HERE}/WORD.{RANK}.mode').st_mode))",
    "time.sleep(0.05)",
)
CLOSING = _pieces(
    "os.dup2(2, 1)",
    "os.nice(1); os.umask(0o77); import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "import builtins; builtins.print = lambda *words, **how: None",
    "sys.path.append('nowhere')",
    "import signal; [signal.signal(each, signal.SIG_DFL) for each in (1, 2, 3, 10, 12, 15)]",
    "import threading; sys.excepthook = None",
    "os.close(0)",
    "sys.stdin.close()",
    "sys.stdout.close()",
    "print('WORD', RANK); sys.stdout.flush(); os.close(1)",
    "os.close(2)",
    "os.closerange(3, 256)",
    "os.closerange(3, 4096)",
    "sys.stdout = sys.stderr",
    "sys.stdout = open(os.devnull, 'w')",
    "os.setsid() if os.getpgrp() != os.getpid() else None",
    "os.chdir('/')",
    "os.environ.clear()",
    "sys.argv.clear()",
    "sys.modules.clear()",
    is_alone=True,
)
TORCH = _pieces(
    "import torch.distributed as dist, torch, threading\ndist.init_process_group('gloo'); groups = [dist.new_group() for _ in range(2)]; sums = [torch.ones(2) * RANK for _ in groups]\nthreads = [threading.Thread(target=lambda i=i: [dist.all_reduce(sums[i], group=groups[i]) for _ in range(20)]) for i in range(2)]\n[t.start() for t in threads]; [t.join() for t in threads]; print('WORD', RANK, [s.tolist() for s in sums]); dist.destroy_process_group()",
    "import torch.distributed as dist\ndist.init_process_group('gloo'); dist.barrier(); print('WORD', RANK, dist.get_backend(), dist.is_torchelastic_launched()); dist.destroy_process_group()",
    "import torch.distributed as dist, torch\ndist.init_process_group('gloo'); work = dist.all_reduce(torch.ones(2), async_op=True); work.wait(); print('WORD', RANK, work.is_completed()); dist.destroy_process_group()",
    "import torch.multiprocessing as mp; q = mp.get_context('fork').SimpleQueue(); q.put(RANK); print('WORD', q.get())",
    "import torch, torch.utils.data as data; print(RANK, [x.tolist() for x in data.DataLoader(torch.arange(6), batch_size=2, num_workers=2, persistent_workers=True)])",
    "import subprocess; print(RANK, subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone', '--no-python', 'sh', '-c', 'exit 0'], capture_output=True).returncode)",
    "import torch.distributed as dist, torch\ndist.init_process_group('gloo'); x = torch.ones(3) * RANK; dist.all_reduce(x); print('WORD', RANK, x.tolist()); dist.barrier(); dist.destroy_process_group()",
    "import torch.distributed as dist, torch\ndist.init_process_group('gloo'); x = torch.arange(4.0) + RANK; dist.broadcast(x, 0); print('WORD', RANK, x.tolist())",
    "import torch.distributed as dist\ndist.init_process_group('gloo'); found = [None] * dist.get_world_size(); dist.all_gather_object(found, {'WORD': RANK}); print('WORD', RANK, found); dist.destroy_process_group()",
    "import torch.distributed as dist\ndist.init_process_group('gloo')\ntry: dist.broadcast(None, 0)\nexcept Exception as error: print('WORD', RANK, type(error).__name__)\ndist.barrier(); dist.destroy_process_group()",
    "import torch.distributed as dist, torch\ndist.init_process_group('gloo'); torch.manual_seed(1); m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2)); m(torch.ones(2, 3) * RANK).sum().backward(); print('WORD', RANK, m.module.weight.grad.tolist()); dist.destroy_process_group()",
    "import torch; print('WORD', RANK, torch.get_num_threads(), torch.get_default_dtype(), torch.distributed.is_torchelastic_launched())",
    "import torch.distributed as dist\ndist.init_process_group('gloo'); g = dist.new_group([0]); print('WORD', RANK, dist.get_world_size(), dist.get_rank(g)); dist.monitored_barrier()",
    needs_torch=True,
)
# The store of the ranks runs before them where torchrun starts them, and in a warm start.
STORE = _pieces(
    "import torch.distributed as dist\nstore = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False); store.set(f'WORD{RANK}', 'x'); print('WORD', RANK, store.get(f'WORD{RANK}'))",
    needs_torch=True,
)
