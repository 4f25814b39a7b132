"""The table of docs/status-page.md names all functions of torch that the launcher replaces in a rank, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launched import Launch

ROOT = Path(__file__).resolve().parents[2]

# A rank looks at all that torch's modules and classes have: whose code comes from a file of ours has been replaced.
SCRIPT = """
import json, os, sys, warnings
from types import FunctionType

warnings.simplefilter("ignore")
import torch, torch.distributed
from torch.optim import optimizer

OURS = tuple(os.path.join(os.environ["OURS"], folder, "") for folder in ("ddp", "launcher"))
names = {}

def look(path, value):
    kinds = {property: lambda: [value.fget, value.fset], staticmethod: lambda: [value.__func__]}
    for function in kinds.get(type(value), lambda: [value])():
        if type(function) is FunctionType and function.__code__.co_filename.startswith(OURS):
            names.setdefault(id(function), set()).add(path)

for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "torch":
        for key, value in list(vars(module).items()):
            look(f"{name}.{key}", value)
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                for attribute, of_class in list(vars(value).items()):
                    look(f"{name}.{key}.{attribute}", of_class)
hooks = [len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)]
print(json.dumps([[sorted(each) for each in names.values()], hooks]))
"""


def rows() -> list[tuple[list[str], str]]:
    """The names in the first column, and the module in the second."""
    page = (ROOT / "docs/status-page.md").read_text()
    table = page.split("<!-- patches:begin -->")[1].split("<!-- patches:end -->")[0]
    cells = [line.strip("|").split("|") for line in table.strip().splitlines()[2:]]
    return [
        (re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", module)[0]) for names, module, *_ in cells
    ]


def is_in_torch(name: str) -> bool:
    """Older releases have fewer collectives."""
    try:
        resolve_name(name)
    except AttributeError:
        return False
    return True


def test_the_table_of_replaced_functions_is_that_of_a_rank(launch: Launch) -> None:
    job = launch("--nproc-per-node", "1", source=SCRIPT, env={"OURS": str(ROOT)})
    assert job.wait() == 0, job.stderr()
    names, hooks = json.loads(job.stdout().splitlines()[-1].partition("] ")[2] or job.stdout())
    assert hooks == [1, 1]
    known = {name for each, _module in rows() for name in each}
    found = [each for each in names if not known.intersection(each)]
    assert not found, "replaced, and not in the table"
    here = {path for each in names for path in each}
    assert not [name for name in known - here if is_in_torch(name)], "in the table, and not replaced"


def test_the_modules_of_the_table_exist() -> None:
    for _names, module in rows():
        assert (ROOT / f"{module}.py").is_file(), module
