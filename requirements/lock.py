"""Writes the lock: every version that `make` and the images install, with the hashes of all files of it. `make lock`.

    torch-cpu.txt, torch.txt   torch alone: its build without CUDA, where one is offered, or that of the index
    install.txt  what `make install` needs beside it       cuda.txt   what torch's CUDA builds need in addition
    test.txt     what the tests need in addition           bench.txt  what the benchmarks need in addition
    tools.txt    the programs of `make lock`, `make audit` and `make sbom`, for an environment of their own
    lint.txt     the policy linter of the manifests, for another: it wants older versions of what we use
    site.txt     the generator of the documentation site, for an environment of its own
    unchanged.txt  packages whose programs tests/unchanged runs, for another
    generator.txt  the compiler of the schemas, for another: as old as the oldest protobuf that we run with
    deploy/docker/service.requirements.txt                 what the image of the service needs

All are cut from one resolution, so a version is the same wherever it occurs. Versions stay as they are but for those
named on the command line (`make lock UPGRADE="grpcio numpy"`, or `UPGRADE=all`). Markers are evaluated here for
every machine that we support, so that a file holds what these need and nothing for others.

Hashes come from the index that is asked. Wheels of torch without CUDA are published elsewhere; those that may be
installed are listed in torch-builds.sha256, as sha256sum writes it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
HERE = ROOT / "requirements"
BUILDS = HERE / "torch-builds.sha256"
SERVICE = ROOT / "deploy/docker/service.requirements.txt"
OLDEST = "3.11"
PYTHONS = (OLDEST, "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
TOOLS = ("cyclonedx-python-lib[json-validation]", "pip-audit", "uv")
# Since these versions anchors are checked, and the theme loads nothing from elsewhere.
SITE = ("mkdocs>=1.6", "mkdocs-material>=9.6", "mike>=2.1", "pymdown-extensions<13")  # 13 wants 3.11.5
# The last whose code runs with protobuf 5.29. There are wheels for Python up to 3.13.
GENERATOR = "grpcio-tools==1.71.*"
# Not hydra: its parser is published as sources only.
UNCHANGED = ("transformers", "lightning", "click", "tensorboard", "wandb")
FOR_CUDA = ("cuda-", "nvidia-", "triton")
_APART = (
    "tools.txt",
    "lint.txt",
    "generator.txt",
    "unchanged.txt",
    "site.txt",
    "torch-cpu.txt",
)  # other environments; another name of a version
HEAD = "# {what}, with the hashes of all its files. Made by `make lock`.\n"


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    marker: str  # "": on every machine
    hashes: tuple[str, ...]  # "sha256:..."

    @property
    def text(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        return " \\\n    ".join(
            (f"{self.name}=={self.version}{marker}", *(f"--hash={each}" for each in self.hashes))
        )


Pins = dict[tuple[str, str], Pin]  # by name and version


def read(text: str) -> Pins:
    """A file of requirements as uv and we write it."""
    found: Pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, *hashes = line.split("--hash=")
            pinned, _, marker = requirement.partition(";")
            name, _, version = pinned.strip().partition("==")
            name = canonicalize_name(name)
            found[name, version] = Pin(name, version, marker.strip(), tuple(h.strip() for h in hashes))
    return found


def written(what: str, pins: Pins) -> str:
    return HEAD.format(what=what) + "".join(f"{pins[key].text}\n" for key in sorted(pins))


# --- markers -----------------------------------------------------------------------------------------


def environments() -> list[dict[str, str]]:
    ours = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    ours |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return [
        {**{k: str(v) for k, v in default_environment().items()}, **ours}
        | {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
        for python, machine in product(PYTHONS, MACHINES)
    ]


def for_our_machines(pins: Pins) -> Pins:
    kept: Pins = {}
    for key, pin in pins.items():
        holds = [not pin.marker or Marker(pin.marker).evaluate(each) for each in environments()]
        if any(holds):
            kept[key] = Pin(pin.name, pin.version, "" if all(holds) else pin.marker, pin.hashes)
    return kept


# --- resolving ---------------------------------------------------------------------------------------


def resolved(
    uv: str, extras: tuple[str, ...], more: tuple[str, ...], like: str, upgrade: tuple[str, ...]
) -> str:
    """What these need; `like`: the versions to stay at."""
    with tempfile.TemporaryDirectory() as folder:
        out, asked = Path(folder, "out.txt"), Path(folder, "asked.in")
        out.write_text(like)
        asked.write_text("".join(f"{each}\n" for each in more))
        words = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"]
        words += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--python-version", OLDEST]
        for each in extras:
            words += ["--extra", each]
        for each in upgrade:
            words += ["--upgrade"] if each == "all" else ["--upgrade-package", each]
        sources = [str(ROOT / "pyproject.toml")] if extras else []
        subprocess.run([*words, "--output-file", str(out), *sources, str(asked)], check=True)
        return out.read_text()


def torch_elsewhere(torch: Pin) -> Pins:
    """The builds of this version that are listed, by their own local versions (`2.13.0+cpu`)."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in BUILDS.read_text().splitlines():
        if line and not line.startswith("#"):
            digest, wheel = line.split()
            version = parse_wheel_filename(wheel)[1]
            if version.public == torch.version:
                found.setdefault((torch.name, str(version)), []).append(f"sha256:{digest}")
    return {key: Pin(*key, torch.marker, tuple(sorted(hashes))) for key, hashes in found.items()}


def locked() -> str:
    """The versions that are locked now."""
    return "".join(path.read_text() for path in sorted(HERE.glob("*.txt")) if path.name not in _APART)


def apart(uv: str, name: str, upgrade: tuple[str, ...], *programs: str) -> Pins:
    """For an environment of its own, whose versions need not be the others'."""
    before = (HERE / name).read_text() if (HERE / name).exists() else ""
    return for_our_machines(read(resolved(uv, (), programs, before, upgrade)))


def renewed(uv: str, upgrade: tuple[str, ...]) -> dict[Path, tuple[str, Pins]]:
    """By file: what it is, and the pins in it."""
    everything = resolved(uv, ("torch", "test", "bench"), ("numpy", "setuptools"), locked(), upgrade)

    def closure(extras: tuple[str, ...], more: tuple[str, ...] = ()) -> Pins:
        return for_our_machines(read(resolved(uv, extras, more, everything, ())))

    install = closure(("torch", "web"), ("numpy", "setuptools"))

    def added(extra: str) -> Pins:
        return {key: pin for key, pin in closure(("torch", extra)).items() if key not in install}

    (torch,) = (key for key in install if key[0] == "torch")
    cuda = {key: pin for key, pin in install.items() if pin.name.startswith(FOR_CUDA)}
    beside = {key: pin for key, pin in install.items() if key not in cuda and key != torch}
    names = {name for name, _ in install}
    wanted = apart(uv, "unchanged.txt", upgrade, *UNCHANGED)
    unchanged = {
        key: pin for key, pin in wanted.items() if key[0] not in names and not key[0].startswith(FOR_CUDA)
    }
    tools = "The programs of `make lock`, `make audit` and `make sbom`"
    return {
        HERE / "torch.txt": ("torch", {torch: install[torch]}),
        HERE / "torch-cpu.txt": ("torch without CUDA", torch_elsewhere(install[torch])),
        HERE / "install.txt": ("What `make install` needs beside torch", beside),
        HERE / "cuda.txt": ("What torch's CUDA builds need in addition", cuda),
        HERE / "test.txt": ("What the tests need in addition", added("test")),
        HERE / "bench.txt": ("What the benchmarks need in addition", added("bench")),
        HERE / "tools.txt": (tools, apart(uv, "tools.txt", upgrade, *TOOLS)),
        HERE / "lint.txt": ("The policy linter of the manifests", apart(uv, "lint.txt", upgrade, "checkov")),
        HERE / "site.txt": (
            "The generator of the documentation site",
            apart(uv, "site.txt", upgrade, *SITE),
        ),
        HERE / "unchanged.txt": ("What the programs of tests/unchanged need beside torch", unchanged),
        HERE / "generator.txt": (
            "The compiler of the schemas",
            apart(uv, "generator.txt", upgrade, GENERATOR),
        ),
        SERVICE: ("What the service needs", closure((), ("grpcio", "protobuf", "setuptools"))),
    }


def main(uv: str, upgrade: tuple[str, ...]) -> None:
    """Nothing is written unless all of it could be resolved."""
    for path, (what, pins) in renewed(uv, upgrade).items():
        path.write_text(written(what, pins)) if pins else path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]))
