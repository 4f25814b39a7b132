"""Which packages that people have beside ours can be installed together with it: the rows of docs/compatibility.md.

    .venv/bin/python deploy/wheels/beside.py UV     # UV: .venv-tools/bin/uv; asks the package index, installs nothing

uv resolves our requirements together with each package: its newest release, and an older one that holds protobuf or
grpcio back.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "3.11"
NEWEST = ("tensorboard", "onnx", "opentelemetry-exporter-otlp-proto-grpc", "ray", "wandb", "mlflow")
NEWEST += ("transformers", "vllm", "lightning", "deepspeed", "tensorflow", "google-api-core", "streamlit")
OLDER = ("wandb==0.22.*", "opentelemetry-exporter-otlp-proto-grpc==1.38.*", "google-api-core==2.28.*")
OLDER += ("grpcio-status==1.76.*", "streamlit==1.50.*", "tensorflow==2.18.*", "onnx==1.17.*", "mlflow==3.4.*")
OLDER += ("vllm==0.11.*", "ray==2.49.*", "tensorboard==2.18.*")
TOGETHER = "tensorboard onnx opentelemetry-exporter-otlp-proto-grpc ray wandb mlflow transformers"
_PINNED = re.compile(r"^([\w.-]+)==([\w.+]+)", re.MULTILINE)
_DIRECT = re.compile(r"^[\w-]+")


def ours() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["torch"]]


def resolved(uv: str, wanted: str) -> dict[str, str]:
    """The versions that are installed together; empty if there are none."""
    words = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", PYTHON]
    # First what others want: uv then keeps its newest release, and looks for a torch that fits.
    words += ["--python-platform", "x86_64-manylinux_2_28", "-"]
    asked = "\n".join((*wanted.split(), *ours()))
    with tempfile.TemporaryDirectory() as folder:  # no file of the project decides about the versions
        done = subprocess.run(words, input=asked, cwd=folder, capture_output=True, text=True, check=False)
    return dict(_PINNED.findall(done.stdout)) if done.returncode == 0 else {}


def row(uv: str, wanted: str) -> str:
    found = resolved(uv, wanted)
    if not found:
        return f"| {wanted} | cannot be installed together | | | |"
    names = [_DIRECT.match(each) for each in wanted.split()]
    what = ", ".join(f"{name[0]} {found.get(name[0], '')}" for name in names if name)
    return f"| {what} | yes | {found['torch']} | {found['protobuf']} | {found['grpcio']} |"


def rows(uv: str, wanted: tuple[str, ...]) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda each: row(uv, each), wanted))


if __name__ == "__main__":
    print("| package | together | torch | protobuf | grpcio |\n|---|---|---|---|---|")
    print("\n".join(rows(str(Path(sys.argv[1]).absolute()), (*NEWEST, *OLDER, TOGETHER))))
