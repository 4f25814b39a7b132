"""Which environment variables an import reads: their values are part of what it leaves behind.

Python code reads them through `os.environ`. Native code reads them when its library is loaded, which nothing shows. So
the beginnings of their names identify these.
"""

from __future__ import annotations

import os
import re
import sys
from _thread import get_ident
from typing import Any

# Which releases of torch we work with. Older ones have no store that takes over an open socket, among other things.

LEAST = (2, 8)


def too_old(release: str) -> str:
    """What is wrong with this release of torch; "" if it is new enough, or cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) >= LEAST:
        return ""
    return f"needs torch {LEAST[0]}.{LEAST[1]} or newer, found {release}: upgrade torch"


# Of the libraries that torch and numpy load: their values count when the library is loaded. Drivers and NCCL read
# theirs when they are first used, and TORCH_DISTRIBUTED_DEBUG is read again in the rank.
FIXED_NATIVELY: tuple[str, ...] = tuple(
    "OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ GOTO_ BLIS_ VECLIB_ MALLOC_ JEMALLOC_ DNNL_ ONEDNN_ MKLDNN_ NPY_ OPENSSL_ "
    "TORCH_LOGS TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES TORCH_CUSTOM_TERMINATE TORCH_ALLOW_TF32_CUBLAS "
    "KINETO_USE_ TORCH_BLAS_PREFER TORCH_LINALG_PREFER TORCH_ROCM_FA_PREFER PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF "
    "PYTORCH_HIP_ALLOC_CONF PYTORCH_API_USAGE".split()
)
# All that native code may read. TQDM_: its import looks through all variables.
READ_NATIVELY = FIXED_NATIVELY + tuple(
    "NUMPY_ GFORTRAN_ I_MPI_ OMPI_ MPI_ ACC_ INTEL_ TORCH_ PYTORCH_ KINETO_ CUDA_ CUDNN_ CUBLAS_ NVIDIA_ HIP_ ROC HSA_ "
    "TQDM_".split()
)
# Python code of torch reads these when it is imported: in a rank, `Reads` of the template says so.
FIXED_BY_IMPORT: tuple[str, ...] = tuple(
    "PYTORCH_JIT PYTORCH_MATCHER_LOGLEVEL TORCHDYNAMO_ TORCHEXPORT_ TORCHINDUCTOR_FORCE_DISABLE_CACHES TORCH_COMPILE_ "
    "COMPILE_STROBELIGHT_ TORCH_CUDAGRAPH_GC TORCH_CUDA_SANITIZER TORCH_FAKE_TENSOR_DEBUG TORCH_DEVICE_BACKEND "
    "TORCH_USE_RTLD_GLOBAL TORCH_TRACE TORCH_DTRACE FX_ NUMPY_ TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK "
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS TORCH_PYTHON_NATIVE_ TORCH_ENRICH_RPOFILER_STACK_TRACE".split()
)


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
