"""Which environment variables an import reads: their values are part of what it leaves behind.

Python code reads them through `os.environ`. Native code reads them when its library is loaded, which nothing shows. So
the beginnings of their names identify these.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

# Of the libraries that torch and numpy load, and of drivers. TQDM_: its import looks through all variables.
_PREFIXES = tuple(
    "OMP_ GOMP_ KMP_ MKL_ MKLDNN_ DNNL_ ONEDNN_ OPENBLAS_ GOTO_ BLIS_ VECLIB_ NPY_ NUMPY_ GFORTRAN_ I_MPI_ OMPI_ "
    "MPI_ ACC_ INTEL_ OPENSSL_ MALLOC_ JEMALLOC_ TORCH_ PYTORCH_ KINETO_ CUDA_ CUDNN_ CUBLAS_ NVIDIA_ HIP_ ROC HSA_ "
    "TQDM_".split()
)

# Those of them whose values count when the library is loaded. Drivers and NCCL read theirs when they are first used,
# and TORCH_DISTRIBUTED_DEBUG is read again in the rank.
FIXED_NATIVELY: tuple[str, ...] = (
    *"OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ GOTO_ BLIS_ VECLIB_ MALLOC_ JEMALLOC_".split(),
    *"TORCH_LOGS TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES".split(),
)


def is_read_natively(name: str) -> bool:
    return name.startswith(_PREFIXES)


def is_fixed_natively(name: str) -> bool:
    return name.startswith(FIXED_NATIVELY)


class Reads:
    """Notes the names that this thread reads from `os.environ`, from its creation to `end`."""

    def __init__(self) -> None:
        names: set[str] = set()
        kind: Any = type(os.environ)
        get, thread = kind.__getitem__, get_ident()

        def noting(environ: Any, name: str) -> Any:
            # Code that looks through all variables depends on none of them by name.
            if get_ident() == thread and sys._getframe(1).f_code.co_name != "__iter__":
                names.add(name)
            return get(environ, name)

        self._names, self._get = names, get
        kind.__getitem__ = noting

    def end(self) -> set[str]:
        kind: Any = type(os.environ)
        kind.__getitem__ = self._get
        return {name for name in self._names if type(name) is str}
