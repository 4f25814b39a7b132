"""Archives that come out the same byte for byte: entries in order, one time, one owner, modes without a umask."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import tarfile
import time
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def normalise_sdist(path: Path, epoch: int) -> None:
    with tarfile.open(path) as archive:
        members = [(each, _content(archive, each)) for each in archive.getmembers()]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in sorted(members, key=lambda pair: pair[0].name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, len(content), epoch
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            archive.addfile(plain, io.BytesIO(content))
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(made.getvalue())


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.isdir():
        return b""
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name}: neither a file nor a folder")
    return file.read()


def normalise_wheel(path: Path, platform: str, epoch: int, folder: Path) -> Path:
    """Write the wheel to `folder`, with this platform in its tags (`any`: as it is)."""
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    info = record.rpartition("/")[0]
    distribution, version, python, abi, _ = path.stem.split("-")
    tags = [f"{python}-{abi}-{each}" for each in platform.split(".")]
    files[f"{info}/WHEEL"] = _with_tags(files[f"{info}/WHEEL"].decode(), tags).encode()
    del files[record]
    files[record] = _record(files, record).encode()
    target = folder / f"{distribution}-{version}-{python}-{abi}-{platform}.whl"
    stamp = time.gmtime(max(epoch, 315_532_800))[:6]  # a zip file knows nothing before 1980
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files, key=lambda each: (each.startswith(info), each == record, each)):
            entry = zipfile.ZipInfo(name, stamp)
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, files[name])
    return target


def _with_tags(text: str, tags: list[str]) -> str:
    rest = re.sub(r"^Tag: .*\n", "", text, flags=re.MULTILINE).rstrip("\n")
    return "".join(f"{line}\n" for line in (*rest.splitlines(), *(f"Tag: {tag}" for tag in tags)))


def _record(files: dict[str, bytes], record: str) -> str:
    rows = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
    return "".join(f"{row}\n" for row in (*rows, f"{record},,"))
