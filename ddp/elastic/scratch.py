"""Memory that outlives a rank: files in a folder that is private to the user, this node's agent and the job.

The launcher names such a folder in DDP_SCRATCH, and removes it when the job has ended. Under another
launcher a folder is made in /dev/shm, named after the process that starts the ranks of this node: it is the
same in every generation, and no other job's. Folders whose process is gone are removed by whoever comes
next. A process that no launcher has started has nothing to survive for; its folder goes by its own name.

A rank keeps its commits in a few *slots*, mapped files that are written over in turn, so that in the long
run a commit is one copy from tensor to mapped memory and not a page is asked of the kernel. The last good
commit is never the one that is written over, nor is one that is being written to disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NAME = re.compile(r"ddp-elastic-(\d+)-(\d+)-(\d+)-(\d+)")
_SLOT = "local{local_rank}.slot{number}"


class ScratchError(OSError):
    """There is no place for commits in memory."""


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where commits of this node may lie, the best place first."""
    given = environ.get("DDP_SCRATCH")
    owner = os.getppid() if is_launched(environ) else os.getpid()
    name = f"ddp-elastic-{os.getuid()}-{_process_space()}-{owner}-{_started(owner)}"
    first = Path(given, "elastic") if given else Path("/dev/shm", name)
    # /dev/shm may be tiny. Then files do as well: what is written stays in memory as long as there is room.
    return [first, Path(tempfile.gettempdir(), name)]


def is_launched(environ: Mapping[str, str]) -> bool:
    """Somebody starts this rank again when it has died."""
    return "TORCHELASTIC_RUN_ID" in environ


def _process_space() -> int:
    """Containers may share /dev/shm: a process id means nothing in another's."""
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int:
    """A process id comes again; together with the instant of its start it does not. 0: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def made(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_ours(folder):
        raise ScratchError(f"{folder} is not a folder of this user alone; remove it, or set TMPDIR")
    return folder


def _is_ours(folder: Path) -> bool:
    """/dev/shm and /tmp are everybody's, and names in them can be guessed."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def sweep(root: Path) -> None:
    """Removes what jobs left here whose launcher is gone."""
    ours = (os.getuid(), _process_space())
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            if named := _NAME.fullmatch(entry.name):
                user, space, owner, started = map(int, named.groups())
                if (user, space) == ours and _started(owner) != started:
                    shutil.rmtree(entry.path, ignore_errors=True)


# --- slots -------------------------------------------------------------------------------------------


@dataclass
class Slot:
    path: Path
    buffer: memoryview
    pinned: bool = False  # somebody reads it
    views: Any = None  # the tensors in it, of whoever writes it


@dataclass
class Slots:
    """Of one rank. `count` of them are kept: two, and one more where a writer to disk may hold one."""

    places: list[Path]
    local_rank: int
    count: int
    spared: set[str] = field(default_factory=set)  # names of slots that are not to be written over first
    _slots: dict[int, Slot] = field(default_factory=dict)
    _last: int | None = None

    def next(self, n_bytes: int) -> Slot:
        """A slot to write the next commit into, of at least that size."""
        number = self._victim()
        slot = self._slots.get(number)
        if slot is None or len(slot.buffer) < n_bytes:
            self._forget(number)
            slot = self._slots[number] = self._made(number, n_bytes)
        return slot

    def keep(self, slot: Slot) -> None:
        """It holds the last good commit from now on."""
        self._last = next(number for number, each in self._slots.items() if each is slot)
        self.spared.clear()

    def _victim(self) -> int:
        free = [
            n
            for n in range(self.count)
            if n != self._last and not (n in self._slots and self._slots[n].pinned)
        ]
        unspared = [n for n in free if self._name(n) not in self.spared]
        return (unspared or free)[0]

    def _name(self, number: int) -> str:
        return _SLOT.format(local_rank=self.local_rank, number=number)

    def _made(self, number: int, n_bytes: int) -> Slot:
        obstacle: OSError | None = None
        for place in self.places:
            path = place / self._name(number)
            try:
                memory = _mapped(made(place) / path.name, n_bytes)
            except OSError as error:
                obstacle = obstacle or error
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                return Slot(path, memoryview(memory))
        assert obstacle is not None
        raise ScratchError(
            f"no place for a commit of {n_bytes >> 20} MiB in {' or '.join(map(str, self.places))} "
            f"({obstacle.strerror or obstacle}); give the container a larger /dev/shm, or set TMPDIR"
        )

    def _forget(self, number: int) -> None:
        """Whoever has it mapped keeps what there was: a new slot of that name is another file."""
        self._slots.pop(number, None)
        for place in self.places:
            with contextlib.suppress(OSError):
                (place / self._name(number)).unlink()

    def remove(self) -> None:
        for number in range(self.count):
            self._forget(number)
        for place in self.places:
            with contextlib.suppress(OSError):  # other ranks of the node may still have theirs
                place.rmdir()


def _mapped(path: Path, n_bytes: int) -> mmap.mmap:
    """Its memory is reserved now: a full /dev/shm is an error here, and would be a deadly signal later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
        return mmap.mmap(fd, n_bytes)
    finally:
        os.close(fd)


def for_reading(path: Path) -> mmap.mmap:
    """A private mapping: a view of it can be handed to torch, which knows no read-only tensors."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def slots_in(places: list[Path]) -> Iterator[Path]:
    """Of all ranks of this node."""
    for place in places:
        if _is_ours(place):
            yield from sorted(place.glob("local*.slot*"))
