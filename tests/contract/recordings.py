"""What torchrun makes of a script, recorded for one version of torch: an answer costs seconds, and changes with torch.

An answer is what differs between a rank under torchrun and the same script under `python`, so that it holds on every
machine. `make record` asks torchrun and writes the file of the installed version; a version that has no file is asked
on the spot. `make nightly` compares the file with torchrun's own answers.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from side_by_side import program, python, script, torchrun, written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Asked = Callable[[Path], Any]

_PYTHON = "{}.{}".format(*sys.version_info)
FILE = (
    Path(__file__).parent / "recorded" / f"torch-{version('torch').partition('+')[0]}-python-{_PYTHON}.json"
)

# What names one run: where its store is, what it is called, where its files are.
OF_ONE_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")

ARGS = ("a b", "é", "--flag=1", "-x", "", "price: $$5", "rank ${local_rank}", "$HOME")
ARGS_OF_RANK_1 = ("a b", "é", "--flag=1", "-x", "", "price: $5", "rank 1", "$HOME")

SHARED = (
    "--role",
    "trainer",
    "--virtual-local-rank",
    "--max-restarts",
    "3",
    "--signals-to-handle",
    "SIGTERM",
)
PRESETS = {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_VISIBLE_DEVICES": "5,7"}
# Ranks; options for torchrun alone, and for both; variables.
ENVIRONMENTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "one rank": (1, ("--standalone",), (), {}),
    "two ranks": (2, ("--master-port", "0"), (), {}),
    "presets": (2, ("--standalone",), SHARED, PRESETS),
}
FAILS = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("bad batch")

main()
"""


def differences(facts: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `facts` has that `plain` has not, or has otherwise; None for what it lacks."""
    found = {name: value for name, value in facts.items() if plain.get(name) != value}
    return found | {name: None for name in plain.keys() - facts.keys()}


def variables(environment: Mapping[str, str], plain: Mapping[str, str]) -> dict[str, str]:
    """Those that a launcher has set, without the values that name one run, and without our own."""
    found = {name: "" if name in OF_ONE_RUN else v for name, v in differences(environment, plain).items()}
    return {name: value for name, value in found.items() if not name.startswith("DDP_")}


def first_cause(path: Path) -> Any:
    message = json.loads(path.read_text())["message"]
    stack, when = message["extraInfo"].pop("py_callstack"), message["extraInfo"].pop("timestamp")
    assert stack.startswith("Traceback")
    assert int(when) > 0
    return message


def _environments(which: str, folder: Path) -> list[dict[str, str]]:
    nproc, options, shared, env = ENVIRONMENTS[which]
    program("main_facts.py", folder)
    python("main_facts.py", "python", cwd=folder, env=env).ok()
    torchrun("main_facts.py", "torchrun", cwd=folder, nproc=nproc, options=options + shared, env=env).ok()
    plain = written(folder, "python")["environment"]
    return [variables(written(folder, "torchrun", rank)["environment"], plain) for rank in range(nproc)]


def _main_facts(folder: Path) -> dict[str, Any]:
    program("main_facts.py", folder)
    python("main_facts.py", "python", *ARGS_OF_RANK_1, cwd=folder).ok()
    torchrun("main_facts.py", "torchrun", *ARGS, cwd=folder, nproc=2).ok()
    facts, plain = written(folder, "torchrun", rank=1), written(folder, "python")
    return {part: differences(facts[part], plain[part]) for part in ("main", "interpreter", "process")}


def _first_cause(folder: Path) -> Any:
    path = folder / "error.json"
    script(folder, FAILS)
    assert torchrun("train.py", cwd=folder, env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 1
    return first_cause(path)


ASKED: dict[str, Asked] = {
    **{f"environment, {which}": lambda at, which=which: _environments(which, at) for which in ENVIRONMENTS},
    "main facts": _main_facts,
    "first cause": _first_cause,
}


def asked(name: str) -> Any:
    """As JSON gives it back."""
    with TemporaryDirectory() as folder:
        return json.loads(json.dumps(ASKED[name](Path(folder))))


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def answer(name: str) -> Any:
    known = recorded()
    return known[name] if name in known else asked(name)


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({name: asked(name) for name in ASKED}, indent=1, sort_keys=True) + "\n")
    print(f"written: {FILE}")
