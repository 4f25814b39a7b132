"""In a rank of `ddp-launch --share-compiled`: what torch.compile makes is kept, and given to ranks that start later.

Nothing happens until torch imports its compiler, which it does when it compiles for the first time. Then, before it
compiles, the rank loads what the node keeps, or else asks the other nodes if the job was restarted. From then on a
thread looks every second whether something was compiled, and saves it when torch has stopped compiling. The thread
also answers other nodes.

Whatever goes wrong is said in one line, and the script compiles as it would have done without this.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ddp.telemetry import contracts, torch_api, torch_names
from ddp_launch_wings.compiled import between_nodes, bundle

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_COMPILER = "torch._inductor.compile_fx"
_TURN_S, _QUIET_TURNS = 1.0, 2


def install() -> None:
    """Called in each rank when it has torch."""
    started, asked = time.time(), os.environ[contracts.SHARE_COMPILED]  # `memory`, or a folder
    scratch = os.environ.get(contracts.SCRATCH, "")
    folders = [folder for folder in (scratch, asked if asked != "memory" else "") if folder]
    sharer = Sharer(folders, started)
    if _COMPILER in sys.modules:
        sharer.begin()
    else:
        sys.meta_path.insert(0, _CompilerSought(sharer))


class Sharer:
    def __init__(self, folders: list[str], started: float) -> None:
        self._folders, self._started, self._pid = folders, started, os.getpid()
        self._key, self._server = "", between_nodes.PeerAnswers()
        self._saved = self._seen = self._quiet = 0

    def begin(self) -> None:
        """Before the first compilation."""
        if os.getpid() != self._pid or not self._folders:  # a process that the rank has forked
            return
        try:
            self._key = bundle.key()
            self._load()
            self._saved = self._seen = bundle.amount() if _has_artifacts() else 0
        except Exception as error:
            _say(f"compiled code was not loaded: {error or type(error).__name__}")
        if self._key and (os.environ.get("LOCAL_RANK") == "0" or bundle.device()):
            threading.Thread(target=self._run, name="ddp-compiled", daemon=True).start()

    # --- loading -----------------------------------------------------------------------------------

    def _load(self) -> None:
        for folder in self._folders:
            data = self._read(os.path.join(folder, _name(self._key)))
            if data is not None and self._use(data, f"from {folder}"):
                return
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        if int(between_nodes.generation() or 1) > 1 and nodes > 1:  # in the first, nobody has anything
            ranks = nodes if bundle.device() else int(os.environ["WORLD_SIZE"])
            data = between_nodes.ask(between_nodes.connected(), self._key, ranks)
            if data is not None and self._use(data, "from another node"):
                bundle.write_once(self._path(), data)

    def _read(self, path: str) -> bytes | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.getuid()):
                _say(f"compiled code in {path} was not loaded: it belongs to another user")
                return None
            if found.st_size > bundle.MOST_BYTES + 4096:
                _say(f"compiled code in {path} was not loaded: it has {found.st_size >> 20} MiB")
                return None
            return file.read()

    def _use(self, data: bytes, where: str) -> bool:
        try:
            count = bundle.give_to_torch(bundle.opened(self._key, data))
        except Exception as error:
            _say(f"compiled code {where} was not used: {error or type(error).__name__}")
            return False
        _say(f"torch got {count} compiled parts {where} ({len(data) / (1 << 20):.1f} MiB)")
        return True

    def _path(self) -> str:
        return os.path.join(self._folders[0], _name(self._key))

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._server.turn(self._key, self._path())
                self._save_if_quiet()
                time.sleep(_TURN_S)
        except Exception as error:
            _say(f"compiled code is not shared: {error or type(error).__name__}")

    def _save_if_quiet(self) -> None:
        compile_lock = torch_api.get(torch_names.COMPILE_LOCK)
        if not compile_lock.acquire(blocking=False):
            self._quiet = 0
            return
        try:
            seen = bundle.amount() if _has_artifacts() else _graphs()
            self._quiet = self._quiet + 1 if seen == self._seen else 0
            self._seen = seen
            if seen == self._saved or self._quiet < _QUIET_TURNS:
                return
            self._saved = seen
            packed = bundle.collect(self._started)
        finally:
            compile_lock.release()
        if packed is not None:
            for folder in self._folders:
                os.makedirs(folder, exist_ok=True)
                bundle.write_once(os.path.join(folder, _name(self._key)), bundle.sealed(self._key, packed))


def _has_artifacts() -> bool:
    import torch

    return hasattr(torch.compiler, "save_cache_artifacts")


def _graphs() -> int:
    return int(torch_api.get(torch_names.GRAPH_COUNTERS)["stats"]["unique_graphs"])


def _name(key: str) -> str:
    return f"compiled-{key}"


def _say(text: str) -> None:
    sys.stderr.write(f"ddp-launch: rank {os.environ.get('RANK', '?')}: {text}\n")
    sys.stderr.flush()


# --- before torch compiles -------------------------------------------------------------------------


class _CompilerSought:
    """An import finder that delegates to the others, and goes away when torch's compiler is found."""

    def __init__(self, sharer: Sharer) -> None:
        self._sharer = sharer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _CompilerLoaded(spec.loader, self._sharer)  # type: ignore[assignment]
        return spec


class _CompilerLoaded:
    def __init__(self, loader: Any, sharer: Sharer) -> None:
        self._loader, self._sharer = loader, sharer

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._sharer.begin()
