"""What a rank saw, as plain values, and the comparison of two of them. Nothing here knows of ranks or groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# How far two sums of the same numbers in another order may lie apart, by the number of digits there are.
CLOSE = {
    torch.float64: (1e-10, 1e-12),
    torch.complex128: (1e-10, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.complex64: (2e-5, 2e-6),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (3e-2, 1e-2),
}

# The label under which an error stands that the case did not foresee.
ENDED = "the case ended in"


@dataclass(frozen=True)
class Frozen:
    """A tensor as it was at one moment."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: str
    content: bytes

    def __repr__(self) -> str:
        values = self.thawed().flatten()
        shown = (
            ", ".join(f"{value:.9g}" for value in values[:6].tolist())
            if values.is_floating_point()
            else values
        )
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}/{list(self.stride)}[{shown}]"

    def thawed(self) -> torch.Tensor:
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).reshape(self.shape)


def frozen(tensor: torch.Tensor) -> Frozen:
    tensor = tensor.detach()
    layout = str(tensor.layout)
    stride = () if tensor.is_sparse else tuple(tensor.stride())
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).resolve_conj().resolve_neg().contiguous()
    content = (
        dense.view(torch.uint8).numpy().tobytes() if dense.dim() and dense.numel() else _scalar_bytes(dense)
    )
    return Frozen(dense.dtype, tuple(dense.shape), stride, layout, content)


def _scalar_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def plain(value: Any) -> Any:
    """A value that can be sent and compared: tensors frozen, containers kept."""
    if isinstance(value, torch.Tensor):
        return frozen(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


@dataclass(frozen=True)
class Transcript:
    """Notes are compared with the other side; remarks (texts of errors, warnings) are there to be looked into."""

    notes: tuple[tuple[str, Any], ...]
    alike: frozenset[str]  # labels that must read the same on every rank, to the bit
    remarks: tuple[tuple[str, str], ...] = ()

    def noted(self, label: str) -> Any:
        return dict(self.notes)[label]

    def remarked(self, label: str) -> str:
        return dict(self.remarks).get(label, "")


def differences(torchs: Transcript, ours: Transcript, exact: bool) -> list[str]:
    """What one rank saw differently under the two classes, in order."""
    found = []
    if [label for label, _ in torchs.notes] != [label for label, _ in ours.notes]:
        mine = {label for label, _ in ours.notes}
        missing = [label for label, _ in torchs.notes if label not in mine]
        other = {label for label, _ in torchs.notes}
        added = [label for label, _ in ours.notes if label not in other]
        found.append(f"noted by torch only: {missing}; by ours only: {added}")
    theirs = dict(torchs.notes)
    for label, value in ours.notes:
        if label in theirs and not same(theirs[label], value, exact):
            found.append(f"{label}\n  torch: {theirs[label]!r}\n  ours:  {value!r}")
    return found + [f"remark {label}: {text}" for label, text in ours.remarks if found]


def disagreements(transcripts: list[Transcript]) -> list[str]:
    """What the ranks of one side saw differently, though all must see the same."""
    found = []
    first = dict(transcripts[0].notes)
    for number, other in enumerate(transcripts[1:], start=1):
        for label, value in other.notes:
            if label in other.alike and not same(first.get(label), value, exact=True):
                found.append(f"{label}\n  rank 0: {first.get(label)!r}\n  rank {number}: {value!r}")
    return found


def same(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, Frozen) and isinstance(other, Frozen):
        return _same_tensor(one, other, exact)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key], exact) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b, exact) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _same_tensor(one: Frozen, other: Frozen, exact: bool) -> bool:
    form = (one.dtype, one.shape, one.stride, one.layout)
    if form != (other.dtype, other.shape, other.stride, other.layout):
        return False
    if one.content == other.content:
        return True
    if exact or one.dtype not in CLOSE:
        return False
    relative, absolute = CLOSE[one.dtype]
    return torch.allclose(one.thawed(), other.thawed(), rtol=relative, atol=absolute, equal_nan=True)
