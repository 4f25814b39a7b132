"""Feeds the targets with bytes, guided by what code they reach: `make fuzz`.

Each target is a process of its own, forked once everything is imported and instrumented (libFuzzer, through atheris,
runs one target per process and ends it). It begins with the seeds and with corpus/TARGET; with `--keep` the few inputs
that reach as much as all become corpus/TARGET. The bytes of a finding lie in found/, and its last line says how to see
it again.

Where there is no atheris (machines that are not x86-64), the seeds and the corpus are mutated without guidance.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
CORPUS, FOUND = HERE / "corpus", HERE / "found"
ONE_INPUT_S = 20  # on a loaded machine; what takes longer is a finding
_MEMORY_MB = 2048
_FOUND = 77
_BLINDLY = 0.3  # of the inputs of a target that knows better
_INSTRUMENTED = ["rendezvous", "launcher", "tomllib"]

if TYPE_CHECKING:
    from targets import Target


def load(*, guided: bool) -> dict[str, Target]:
    sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "shell")]
    if guided:
        import atheris

        with atheris.instrument_imports(include=_INSTRUMENTED):
            from targets import TARGETS
    else:
        from targets import TARGETS
    return TARGETS


def corpus_of(target: Target) -> list[bytes]:
    files = sorted((CORPUS / target.name).glob("*"))
    return [*target.seeds, *(file.read_bytes() for file in files)]


def kept(folder: Path, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]
    path.write_bytes(data)
    return path


# --- one target, in a process of its own ---------------------------------------------------------------------


def explore(target: Target, folder: str, words: list[str], *, guided: bool) -> int:
    """The exit code; 0: nothing was found. What libFuzzer has to say is shown only when something was."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            code = 70
            try:
                code = (_guided if guided else _unguided)(target, folder, words)
            except SystemExit as error:  # as libFuzzer ends
                code = int(error.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            said.seek(0)
            print(said.read()[-4000:].decode(errors="replace"))
    return code


def _checked(target: Target, data: bytes) -> None:
    """A finding ends the process, and its bytes are kept."""
    try:
        target(data)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        path = kept(FOUND / target.name, data)
        again = f"python tests/fuzz/fuzz.py {target.name} --replay {os.path.relpath(path)}"
        print(f"to see it again: {again}")
        sys.stdout.flush()
        os._exit(_FOUND)


def _guided(target: Target, folder: str, words: list[str]) -> int:
    """libFuzzer ends the process itself; what took too long or too much memory it writes down."""
    import atheris

    FOUND.mkdir(exist_ok=True)
    limits = [f"-timeout={ONE_INPUT_S}", f"-rss_limit_mb={_MEMORY_MB}", f"-max_len={target.longest}"]
    places = [f"-artifact_prefix={FOUND}/{target.name}-", folder]
    change = target.change

    def changed(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        blindly = change is None or chance.random() < _BLINDLY
        return (atheris.Mutate(data, len(data)) if blindly else change(data, chance))[:most]

    own = {"custom_mutator": changed} if change is not None else {}
    atheris.Setup([sys.argv[0], *limits, *words, *places], lambda data: _checked(target, data), **own)
    atheris.Fuzz()
    return 0


def _unguided(target: Target, folder: str, words: list[str]) -> int:
    settings = dict(word[1:].split("=") for word in words)
    chance = random.Random(int(settings["seed"]) or None)
    until = time.monotonic() + float(settings.get("max_total_time") or "inf")
    sources = corpus_of(target)
    runs = int(settings.get("runs", "-1"))  # -1: as many as there is time for
    while runs and time.monotonic() < until:
        runs -= 1
        change = mutated if target.change is None or chance.random() < _BLINDLY else target.change
        data = change(chance.choice(sources), chance)[: target.longest]
        _checked(target, data)
    return 0


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randint(1, 8)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                changed[at:at] = changed[: chance.randint(1, 64)]
            case _ if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


# --- all of them -----------------------------------------------------------------------------------------------


def campaign(targets: list[Target], words: list[str], *, guided: bool, keep: bool) -> list[str]:
    """The names of those in which something was found."""
    failed = []
    for target in targets:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for data in corpus_of(target):
                kept(Path(folder), data)
            before = len(os.listdir(folder))
            code = explore(target, folder, words, guided=guided)
            new = len(os.listdir(folder)) - before
            if keep and not code:
                _renewed(target, Path(folder))
        said = "nothing found" if not code else f"FOUND SOMETHING (code {code})"
        print(f"{target.name}: {said}, {new} new inputs, {time.monotonic() - began:.0f} s", flush=True)
        failed += [target.name] if code else []
    with contextlib.suppress(OSError):
        FOUND.rmdir()  # nothing is in it
    return failed


def _renewed(target: Target, folder: Path) -> None:
    """The corpus of a target becomes the few that reach what all do. What was found once stays (`regression-*`)."""
    from reach import smallest

    place = CORPUS / target.name
    found = sorted(place.glob("regression-*"))
    there = [*target.seeds, *(file.read_bytes() for file in found)]
    chosen = smallest(target, there, (file.read_bytes() for file in folder.iterdir()))
    for old in set(place.glob("*")) - set(found):
        old.unlink()
    for data in chosen:
        kept(place, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", help="default: all of them")
    parser.add_argument("--minutes", type=float, default=2.0, help="in all (default: 2)")
    parser.add_argument("--runs", type=int, default=-1, help="of each target, instead of a time")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--keep", action="store_true", help="renew corpus/ with what reaches something new")
    parser.add_argument(
        "--replay", metavar="FILE", help="feed one target with these bytes, and show what comes of it"
    )
    asked = parser.parse_args()
    guided = _has_atheris() and not asked.replay
    targets = load(guided=guided)
    chosen = [targets[name] for name in asked.targets] or list(targets.values())
    if asked.replay:
        chosen[0](Path(asked.replay).read_bytes())
        print(f"{chosen[0].name}: nothing found")
        return 0
    words = [f"-runs={asked.runs}", f"-seed={asked.seed}", "-verbosity=0", "-print_final_stats=0"]
    if asked.runs < 0:
        words.append(f"-max_total_time={max(1, round(asked.minutes * 60 / len(chosen)))}")
    failed = campaign(chosen, words, guided=guided, keep=asked.keep)
    return 1 if failed else 0


def _has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
