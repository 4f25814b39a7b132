"""What people do around the start of a script: each habit is a small job whose ranks look at their interpreter."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCRIPT = """{first}import fingerprint
{before}
import torch
fingerprint.look("torch")
{after}
fingerprint.end()
"""
_STEP = 'fingerprint.train()\nfingerprint.look("step")'


@dataclass(frozen=True)
class Habit:
    """`before` runs before the script imports torch; `wrapper` is a command that starts the launcher."""

    before: str = ""
    first: str = ""  # lines at the very beginning
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ("train.py",)
    path: str = "train.py"
    wrapper: tuple[str, ...] = ()
    own_python: bool = (
        False  # an interpreter whose folder `env` the habit changes, and which has folders of users
    )
    trains: bool = True  # one step, which imports torch._dynamo
    step: str = _STEP

    @property
    def source(self) -> str:
        return _SCRIPT.format(first=self.first, before=self.before, after=self.step if self.trains else "")


def _shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", f'{text}\nexec "$@"', "sh")


_PACKAGES = "lib/python{}.{}/site-packages".format(*sys.version_info)
_USERS, _ENVS = f"base/{_PACKAGES}", f"env/{_PACKAGES}"
_SITE = {"PYTHONPATH": "site"}
_THREAD = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='habit').start()\n"
)

HABITS = {
    "nothing": Habit(),
    # variables that the script sets
    "variables of torch": Habit(
        "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'\nos.environ['OMP_NUM_THREADS'] = '3'"
    ),
    "variables in a module": Habit(
        "import settings", files={"settings.py": "import os\nos.environ['MKL_NUM_THREADS'] = '2'"}
    ),
    "variables in a package": Habit(
        "import app.settings",
        files={
            "app/__init__.py": "import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')",
            "app/settings.py": "import os\nos.environ['NUMEXPR_MAX_THREADS'] = '2'",
        },
    ),
    "variables in a package that is run": Habit(
        path="app/__main__.py",
        words=("-m", "app"),
        files={"app/__init__.py": "import os\nos.environ['OMP_NUM_THREADS'] = '2'"},
    ),
    "variables of its own": Habit(
        "import os\nos.environ['WANDB_MODE'] = 'offline'\nos.environ['TOKENIZERS_PARALLELISM'] = 'no'"
    ),
    "a variable that is removed": Habit("import os\nos.environ.pop('OMP_NUM_THREADS', None)"),
    "variables put in C": Habit("import os\nos.putenv('OMP_NUM_THREADS', '2')"),
    # settings of the interpreter and of libraries
    "another folder": Habit("import os\nos.makedirs('outputs', exist_ok=True)\nos.chdir('outputs')"),
    "a start method": Habit("import multiprocessing\nmultiprocessing.set_start_method('spawn')"),
    "a default type": Habit("import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_num_threads(2)"),
    "a changed library": Habit(
        "import json, os\njson.dumps = lambda *args, **named: '{}'\nos.cpu_count = lambda: 3\n"
        "import socket\nsocket.setdefaulttimeout(33)"
    ),
    "filters of warnings": Habit(
        "import warnings\nwarnings.filterwarnings('ignore', category=UserWarning)\nwarnings.simplefilter('once')"
    ),
    "logging": Habit(
        "import logging\nlogging.basicConfig(level=logging.DEBUG)\nlogging.captureWarnings(True)"
    ),
    "handlers of signals": Habit(
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])"
    ),
    "a thread": Habit(_THREAD),
    "limits": Habit(
        "import os, resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (900, 2000))\nos.umask(0o27)\n"
        "sys.setrecursionlimit(5000)\nimport gc\ngc.set_threshold(5000, 20, 20)"
    ),
    "locks of a module": Habit(
        "import locks",
        files={
            "locks.py": "import multiprocessing, random\nLOCK = multiprocessing.Lock()\nRANDOM = random.Random()\n"
        },
    ),
    "an import hook": Habit(
        "import sys\nclass Finder:\n    def find_spec(self, name, path=None, target=None): return None\n"
        "sys.meta_path.insert(0, Finder())\nsys.excepthook = lambda *_: None"
    ),
    "a locale": Habit("import locale\nlocale.setlocale(locale.LC_ALL, 'C.UTF-8')", env={"LANG": "C.UTF-8"}),
    "seeds": Habit(
        "import random\nrandom.seed(1)\nimport numpy\nnumpy.random.seed(1)\nimport torch\ntorch.manual_seed(1)"
    ),
    "parts of torch": Habit(
        "import torch.nn, torch.utils.data, torch.distributed.checkpoint, numpy", trains=False
    ),
    "future": Habit(first="from __future__ import annotations\n", trains=False),
    # code of the user at each start
    "sitecustomize": Habit(
        env=_SITE,
        files={
            "site/sitecustomize.py": "import os\nos.environ['OF_RANK'] = os.environ.get('RANK', 'none')\n"
        },
    ),
    "sitecustomize with a thread": Habit(env=_SITE, files={"site/sitecustomize.py": _THREAD}, trains=False),
    "usercustomize": Habit(
        env={"PYTHONUSERBASE": "base"},
        own_python=True,
        files={f"{_USERS}/usercustomize.py": "import os\nos.environ['SEEN'] = os.environ.get('RANK', '')\n"},
    ),
    "a pth file": Habit(
        env={"PYTHONUSERBASE": "base"},
        own_python=True,
        files={f"{_USERS}/habit.pth": "import os; os.environ['SEEN'] = os.environ.get('RANK', '')\n"},
    ),
    "a pth file of the environment": Habit(
        files={f"{_ENVS}/habit.pth": "import os; os.environ['SEEN'] = os.environ.get('RANK', '')\n"},
        own_python=True,
        trains=False,
    ),
    "a pth file with a folder": Habit(
        env={"PYTHONUSERBASE": "base"},
        own_python=True,
        files={
            f"{_USERS}/habit.pth": "../more\n",
            f"{_USERS}/../more/extra.py": "A = 1\n",
        },
        before="import sys, os",
        trains=False,
    ),
    # where the script is, and where modules are searched
    "an empty PYTHONPATH": Habit(env={"PYTHONPATH": ""}, trains=False),
    "a relative PYTHONPATH": Habit(
        env={"PYTHONPATH": "lib:.:"}, files={"lib/mine.py": "A = 1"}, before="import mine"
    ),
    "no user folders": Habit(
        env={"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": "."}, trains=False
    ),
    "a module": Habit(path="train.py", words=("-m", "train"), trains=False),
    "a package": Habit(
        path="app/train.py", words=("-m", "app.train"), files={"app/__init__.py": ""}, trains=False
    ),
    "a folder below": Habit(
        path="src/train.py", words=("src/train.py", "--lr", "0.1", "two words", ""), env={"PYTHONPATH": "."}
    ),
    "a link to a script": Habit(
        path="src/train.py", words=("link.py",), links={"link.py": "src/train.py"}, env={"PYTHONPATH": "."}
    ),
    # variables of the interpreter
    "optimized": Habit(env={"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"}, trains=False),
    "warnings are errors": Habit(env={"PYTHONWARNINGS": "error::ImportWarning,ignore::DeprecationWarning"}),
    "a hash seed": Habit(env={"PYTHONHASHSEED": "7"}, trains=False),
    "UTF-8": Habit(env={"PYTHONUTF8": "1", "LC_ALL": "C"}, trains=False),
    "the C locale": Habit(env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, trains=False),
    "an encoding": Habit(env={"PYTHONIOENCODING": "latin-1:replace"}, trains=False),
    "development": Habit(env={"PYTHONFAULTHANDLER": "1", "PYTHONTRACEMALLOC": "1"}, trains=False),
    "unbuffered": Habit(env={"PYTHONUNBUFFERED": "1", "PYTHONMALLOC": "malloc"}, trains=False),
    "numbers of threads": Habit(
        env={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "NUMEXPR_NUM_THREADS": "3"}
    ),
    "variables of torch for all": Habit(
        # no DistributedDataParallel: with DETAIL, torch 2.13 ends its ranks by SIGSEGV there, also under torchrun
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_LOGS": "+distributed"},
        step='fingerprint.reduce()\nfingerprint.look("step")',
    ),
    # what the shell sets
    "no standard input": Habit(wrapper=_shell("exec <&-"), trains=False),
    "standard input from a pipe": Habit(wrapper=("sh", "-c", 'echo 1 | "$@"', "sh"), trains=False),
    "output to a file": Habit(wrapper=_shell("exec >>said 2>&1"), trains=False),
    "settings of a shell": Habit(
        wrapper=_shell(
            "umask 027; ulimit -S -n 700; ulimit -c 0; ulimit -s 16384; trap '' USR1 PIPE; exec 7</dev/null"
        ),
        trains=False,
    ),
    "a low priority": Habit(
        wrapper=("nice", "-n", "7", "chrt", "--batch", "0", "taskset", "-c", "0"), trains=False
    ),
}

# For `make test`: several habits in one job, that is three imports of torch.
SHORT = {
    "many things at once": Habit(
        "\n".join(
            HABITS[name].before
            for name in (
                "locks of a module",
                "handlers of signals",
                "limits",
                "logging",
                "variables of its own",
                "variables in a package",
            )
        ),
        files={**HABITS["locks of a module"].files, **HABITS["variables in a package"].files},
        env={"PYTHONPATH": "lib:", "PYTHONWARNINGS": "ignore::DeprecationWarning"},
        wrapper=HABITS["settings of a shell"].wrapper,
    ),
}

# Each row of differences.txt permits something in one of these. What starts ranks learns nothing in another folder.
EVERY_ROW = (
    Habit(
        "\n".join(HABITS[name].before for name in ("limits", "filters of warnings")),
        env=HABITS["numbers of threads"].env,
        wrapper=_shell("exec <&- >>said 2>&1"),
    ),
    HABITS["another folder"],
)
