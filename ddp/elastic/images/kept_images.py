"""Memory that is kept when a rank ends: files in a folder, one per user, per launcher on this node, and per job.

The launcher names the folder in DDP_SCRATCH and removes it after the job. Under another launcher, ranks use a folder in
/dev/shm. Its name contains the id of the process that starts the ranks of this node, so it is the same in every
generation and differs between jobs. The next job removes folders whose process is gone. A process without a launcher is
never restarted, so its folder contains its own process id.

A rank keeps its commits in a few *slots*, which are mapped files that it overwrites in turn. So after the first commits
a commit is one copy from tensors to mapped memory, and the kernel allocates no pages. A rank never overwrites the last
good commits, or a commit that is being written to disk.

The kernel takes longer to give and clear the pages of a slot than a commit takes. So a thread makes large slots before
commits need them. After a restart they replace slots that are not needed any more. Later, it makes slots that have no
file yet. If other ranks may still need the commit in a file, only the commit that overwrites it replaces the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp.telemetry.coded import CodedError
from ddp.telemetry.contracts import SCRATCH

# --- pages -----------------------------------------------------------------------------------------
#
# Advice to the kernel about pages of memory before they are used. Advice that it does not know has no effect.

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_LARGE_PAGE = 2 << 20


def ask_for_large_pages(address: int, n_bytes: int) -> None:
    """A fault for each 4 KiB takes longer than what is written there."""
    begin = -(-address // _LARGE_PAGE) * _LARGE_PAGE
    whole = (address + n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if (advise := _madvise()) is not None and whole > 0:
        advise(begin, whole, _MADV_HUGEPAGE)


def map_now(buffer: memoryview) -> None:
    """Let the kernel map all pages of a writable buffer, which begins at a page. Other threads run meanwhile."""
    if (advise := _madvise()) is not None:
        advise(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), _MADV_POPULATE_WRITE)


@functools.cache
def _madvise() -> Any:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


# --- the folder and its slots ----------------------------------------------------------------------

_NAME = re.compile(r"ddp-elastic-(\d+)-(\d+)-(\d+)-(\d+)(?:-[a-z0-9_]+)?")
_SLOT = "local{local_rank}.slot{number}"
_LARGE = 4 << 20  # bytes of a slot that is made in a thread


class ScratchError(CodedError, OSError):
    """There is no space for commits in memory."""

    code = "DDP-8003"


def folders(environ: Mapping[str, str], scope: str = "") -> list[Path]:
    """The folders for commits of this node, the preferred one first. `scope`: of one of several States."""
    given = environ.get(SCRATCH)
    suffix = f"-{scope}" if scope else ""
    owner = os.getppid() if is_launched(environ) else os.getpid()
    name = f"ddp-elastic-{os.getuid()}-{_process_space()}-{owner}-{_start_time(owner)}{suffix}"
    first = Path(given, f"elastic{suffix}") if given else Path("/dev/shm", name)
    # /dev/shm may be small. Ordinary files work as well: the page cache keeps them in memory while there is space.
    return [first, Path(tempfile.gettempdir(), name)]


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher restarts this rank after it has died."""
    return "TORCHELASTIC_RUN_ID" in environ


def _process_space() -> int:
    """The PID namespace: containers may share /dev/shm, and a process id is valid only in its own namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    """The start time of a process, because process ids are reused; 0 if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def make_folder(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_ours(folder):
        raise ScratchError(
            f"cannot use {folder} for commits: it must be a folder of this user with mode 0700. Remove it if it is "
            "yours, or set TMPDIR to another folder"
        )
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether a folder belongs to this user alone: any user can create folders with such names in /dev/shm and /tmp."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def sweep(places: list[Path]) -> None:
    """Remove the folders of jobs whose launcher is gone, beside ours: in memory now, on disk while the job goes on."""
    _sweep(places[0].parent)
    for place in places[1:]:
        _sweep_beside(place.parent)


@functools.cache
def _sweep_beside(root: Path) -> None:
    """Sweep a folder that may have very many entries, once in a process, in the background."""
    with contextlib.suppress(RuntimeError):  # the process cannot start another thread: the next job sweeps
        threading.Thread(target=_sweep, args=(root,), name="ddp-sweep", daemon=True).start()


def _sweep(root: Path) -> None:
    ours = (os.getuid(), _process_space())
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            if named := _NAME.fullmatch(entry.name):
                user, space, owner, started = map(int, named.groups())
                if (user, space) == ours and _start_time(owner) != started:
                    shutil.rmtree(entry.path, ignore_errors=True)


# --- slots -------------------------------------------------------------------------------------------


@dataclass
class Slot:
    path: Path
    buffer: memoryview
    being_written: bool = False  # to disk
    shared: bool = False  # other nodes keep parity of it, or compute it
    was_offered: bool = False  # to the driver of a device, to pin it
    views: Any = None  # tensors in the slot, cached by its writer


@dataclass
class Slots:
    """The slots of one rank.

    `count`: one more than `n_whole`, the number of last commits that are not overwritten. One more again if the disk
    writer may hold one of them.
    """

    places: list[Path]
    local_rank: int
    count: int
    spared: set[str] = field(default_factory=set)  # names of slots that are overwritten last
    held: set[str] = field(default_factory=set)  # names of slots that are not overwritten
    n_whole: int = 1
    _slots: dict[int, Slot] = field(default_factory=dict)
    _last: list[int] = field(default_factory=list)  # the numbers of those with the last commits
    _thread: threading.Thread | None = None
    _made: list[tuple[int, Slot]] = field(default_factory=list)  # by the thread

    def next(self, n_bytes: int) -> Slot:
        """Return a slot of at least this size for the next commit."""
        self.settle()
        number = self._free()[0]
        slot = self._slots.get(number)
        if slot is None or len(slot.buffer) < n_bytes:
            self._forget(number)
            slot = self._slots[number] = self._make(number, n_bytes)
        return slot

    def keep(self, slot: Slot) -> None:
        """Mark the slot as the last good commit."""
        number = next(number for number, each in self._slots.items() if each is slot)
        self._last = [*self._last, number][-self.n_whole :]
        self.spared.clear()
        self._make_another(len(slot.buffer))

    def _free(self) -> list[int]:
        """The slots that may be overwritten: those first that are there, and spared ones only if there is no other."""
        free = [n for n in range(self.count) if n not in self._last and not self._is_in_use(n)]
        unspared = [n for n in free if self._name(n) not in self.spared]
        return sorted(unspared or free, key=lambda number: number not in self._slots)

    def _is_in_use(self, number: int) -> bool:
        slot = self._slots.get(number)
        return self._name(number) in self.held or (slot is not None and (slot.being_written or slot.shared))

    def _name(self, number: int) -> str:
        return _SLOT.format(local_rank=self.local_rank, number=number)

    def _make(self, number: int, n_bytes: int) -> Slot:
        path, buffer = new_file(self.places, self._name(number), n_bytes)
        return Slot(path, buffer)

    def _forget(self, number: int) -> None:
        """Remove a slot. A process that has mapped it keeps the content: a new slot of this name is another file."""
        self._slots.pop(number, None)
        self._unlink(number)

    def _unlink(self, number: int) -> None:
        for place in self.places:
            with contextlib.suppress(OSError):
                (place / self._name(number)).unlink()

    def replace_old(self) -> None:
        """Make the first slots of this generation. Call it when all ranks have read the old ones.

        If this rank has unmapped them before, the thread frees their memory.
        """
        if self._slots:  # a commit was made already, and no slot is spared any more
            return
        sizes = [(number, self._size_of(number)) for number in self._free()[: self.n_whole + 1]]
        self._make_in_thread(
            [each for each in sizes if each[1] >= _LARGE and self._name(each[0]) not in self.spared]
        )

    def _make_another(self, n_bytes: int) -> None:
        """Make the slot of the next commit, if it takes no memory that would not be needed anyway."""
        if n_bytes < _LARGE or len(self._slots) > self.n_whole:
            return
        for number in self._free()[:1]:
            if number not in self._slots and not self._size_of(number):
                self._make_in_thread([(number, n_bytes)])

    def _size_of(self, number: int) -> int:
        """The bytes of the file of a slot, of this generation or an earlier one; 0 if there is none."""
        for place in self.places:
            with contextlib.suppress(OSError):
                return (place / self._name(number)).stat().st_size
        return 0

    def _make_in_thread(self, wanted: list[tuple[int, int]]) -> None:
        self.settle()
        thread = threading.Thread(target=self._make_all, args=(wanted,), name="ddp-slots", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process cannot start another thread: commits make them
            if wanted:
                thread.start()
                self._thread = thread

    def _make_all(self, wanted: list[tuple[int, int]]) -> None:
        for number, n_bytes in wanted:
            self._unlink(number)
            try:
                slot = self._make(number, n_bytes)
            except OSError:
                return  # the commit that needs it tries again, and says why it cannot
            map_now(slot.buffer)
            self._made.append((number, slot))

    def settle(self) -> None:
        """Wait for the thread. Afterwards it touches no file."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._slots.update(self._made)
            self._made.clear()

    def remove(self) -> None:
        self.settle()
        for number in range(self.count):
            self._forget(number)
        for place in self.places:
            with contextlib.suppress(OSError):  # other ranks of the node may still have theirs
                place.rmdir()


def new_file(places: list[Path], name: str, n_bytes: int) -> tuple[Path, memoryview]:
    """Create a file of this size in the first place that has space, and map it."""
    obstacle: OSError | None = None
    for place in places:
        path = place / name
        try:
            memory = _map(make_folder(place) / path.name, n_bytes)
        except OSError as error:
            obstacle = obstacle or error
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            return path, memoryview(memory)
    assert obstacle is not None
    raise ScratchError(
        f"no space for a commit of {n_bytes >> 20} MiB in {' or '.join(map(str, places))}: "
        f"{obstacle.strerror or obstacle}. Enlarge /dev/shm, or set TMPDIR to a folder with enough free space"
    )


def _map(path: Path, n_bytes: int) -> mmap.mmap:
    """Map a file and reserve its memory now: otherwise a later write to a full /dev/shm would cause SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
        return mmap.mmap(fd, n_bytes)
    finally:
        os.close(fd)


def map_for_reading(path: Path) -> mmap.mmap:
    """Map a file privately and writable, because torch does not support read-only tensors."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def parities_in(places: list[Path]) -> Iterator[Path]:
    """The parity chunks that ranks of this node keep for other nodes."""
    for place in places:
        if _is_ours(place):
            yield from sorted(place.glob("parity-*"))


def slots_in(places: list[Path]) -> Iterator[Path]:
    """The slots of all ranks of this node."""
    for place in places:
        if _is_ours(place):
            yield from sorted(place.glob("local*.slot*"))
