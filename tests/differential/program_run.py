"""Runs a drawn program on one rank under one class, and writes down everything that the script could see.

The record of an operation is a dictionary: a name for each thing (`grad 0.layers.1.weight`) and its bits. An exception
that the script itself raised (`Broken`) is caught, as a script would; any other one ends the program on this rank.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import threading
import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from drawn_model import WIDTH, Broken, Net, value_of
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils import dlpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from drawn_program import Op, Program

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
_MOST_BYTES = 1024


class Run:
    def __init__(
        self, program: Program, rank: int, wrap: Callable[..., Any], group: Any, at: Callable[[int], None]
    ) -> None:
        self.program, self.rank, self._wrap, self._group, self._at = program, rank, wrap, group, at
        self.dtype = getattr(torch, program.dtype)
        self.records: list[dict[str, Any]] = []
        self.seen: dict[str, Any] = {}
        self._held: list[Any] = []
        self._batches = 0
        self._hooks = 0

    def all(self) -> list[dict[str, Any]]:
        """Construct the wrappers, then do each operation. -> a record for the construction, and one for each."""
        for i in range(-1, len(self.program.ops)):
            self._at(i)
            self.seen = {}
            self.records.append(self.seen)
            if not self._does(i):
                break
        return self.records

    def _does(self, i: int) -> bool:
        """-> whether the program goes on."""
        try:
            if i < 0:
                self._construct()
            else:
                op = self.program.ops[i]
                getattr(self, f"_{op['kind']}")(op)
        except Broken:
            self.seen["broken"] = True
            for wrapped in self.wrapped:
                wrapped.zero_grad()
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-12:])
            names = [each.__name__ for each in type(error).__mro__]
            self.seen["raised"] = (names, str(error), text)
            return False
        self._look()
        return True

    def _construct(self) -> None:
        torch.manual_seed(self.program.seed)
        first = Net(self.program)
        self.nets = [first]
        if self.program.wrappers > 1:
            self.nets.append(Net(self.program, list(first.layers) if self.program.shared else None))
        if self.program.in_backward:
            _apply_optimizer_in_backward(torch.optim.SGD, first.parameters(), {"lr": 0.05})
        self.wrapped = [self._wrapped(net) for net in self.nets]
        self.optimizers = [_OPTIMIZERS[self.program.optimizer](net.parameters()) for net in self.nets]

    def _wrapped(self, net: Net) -> Any:
        wrapped = self._wrap(net, process_group=self._group, **self.program.options)
        if self.program.hook:
            wrapped.register_comm_hook(*_hook(self.program.hook, self._group))
        return wrapped

    # --- what can be seen ----------------------------------------------------------------------------

    def _look(self) -> None:
        for n, net in enumerate(self.nets):
            for name, parameter in net.named_parameters():
                self.seen[f"grad {n}.{name}"] = bits(parameter.grad)
                self.seen[f"parameter {n}.{name}"] = bits(parameter)
            for name, buffer in net.named_buffers():
                self.seen[f"buffer {n}.{name}"] = bits(buffer)
        for i, held in enumerate(self._held):
            self.seen[f"held {i}"] = bits(held)

    # --- parts of a step -------------------------------------------------------------------------------

    def _of(self, op: Op) -> tuple[Net, Any, torch.optim.Optimizer]:
        n = op.get("wrapper", 0) % len(self.nets)
        return self.nets[n], self.wrapped[n], self.optimizers[n]

    def _batch(self) -> torch.Tensor:
        self._batches += 1
        chance = torch.Generator().manual_seed(self.rank * 100_003 + self._batches * 7 + self.program.seed)
        return torch.randn(3, WIDTH, generator=chance).to(self.dtype)

    def _forward(self, called: Any, op: Op, x: torch.Tensor) -> torch.Tensor:
        form = op.get("form", "")
        uses = op["uses"][self.rank] if "uses" in op else ()
        breaks = op.get("breaks")
        there = tuple(breaks[:2]) if breaks and self.rank in breaks[2] else None
        touch = op["touch"][self.rank] if "touch" in op else None
        out = called(x, uses, form, op.get("checkpoint", ""), there, touch)
        value = value_of(out, form)
        loss = value.abs().pow(2).sum() if value.is_complex() else value.pow(2).sum()
        return loss * op["factor"][self.rank] if "factor" in op else loss

    def _step(self, op: Op) -> None:
        net, wrapped, _ = self._of(op)
        local = op.get("local", "")
        with _in_thread() if op.get("thread") else nullcontext():
            with ExitStack() as stack:
                for _ in range(_depth(local, "forward")):
                    stack.enter_context(wrapped.no_sync())
                batches = [self._batch() for _ in range(op.get("forwards", 1))]
                for batch in batches:
                    batch.requires_grad_(bool(op.get("input")) or op.get("checkpoint") == "reentrant")
                losses = [self._forward(wrapped, op, batch) for batch in batches]
            if op.get("between"):
                self._train_another(wrapped)
            with self._frozen(net, op), ExitStack() as stack:
                for _ in range(_depth(local, "backward")):
                    stack.enter_context(wrapped.no_sync())
                self._backward(net, op, losses, batches)
        for i, (loss, batch) in enumerate(zip(losses, batches, strict=True)):
            self.seen[f"loss {i}"] = bits(loss)
            self.seen[f"input {i}"] = bits(batch.grad)

    def _train_another(self, wrapped: Any) -> None:
        """A whole step of the other wrapper, between a forward and its backward."""
        other = next(each for each in self.wrapped if each is not wrapped)
        other_batch = self._batch().requires_grad_()
        self._forward(other, {}, other_batch).backward()
        self.seen["input between"] = bits(other_batch.grad)

    @contextmanager
    def _frozen(self, net: Net, op: Op) -> Iterator[None]:
        chosen = [p for i in op.get("frozen_between", ()) for p in net.parameters_of(i) if p.requires_grad]
        for parameter in chosen:
            parameter.requires_grad_(False)
        yield
        for parameter in chosen:
            parameter.requires_grad_(True)

    def _backward(self, net: Net, op: Op, losses: list[torch.Tensor], batches: list[torch.Tensor]) -> None:
        order = op.get("order", "sum")
        if order == "sum":
            losses = [sum(losses)]  # type: ignore[list-item]
        elif order == "last":
            losses = losses[-1:]
        if order == "reversed":
            losses = losses[::-1]
        for loss in losses:
            self._one_backward(net, op, loss)

    def _one_backward(self, net: Net, op: Op, loss: torch.Tensor) -> None:
        if op.get("penalty"):
            used = [p for p in net.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, used, create_graph=True, allow_unused=True) if used else ()
            loss = loss + sum(g.abs().pow(2).sum() for g in found if g is not None) * 0.1
        if op.get("again"):
            loss.backward(retain_graph=True)
            for parameter in list(net.parameters())[:2]:
                self.seen[f"between {parameter.shape}"] = bits(parameter.grad)
        into = [p for i in op.get("into", ()) for p in net.parameters_of(i) if p.requires_grad]
        if op.get("elsewhere"):
            _in_another_thread(lambda: loss.backward(inputs=into or None))
        else:
            loss.backward(inputs=into or None)

    # --- operations --------------------------------------------------------------------------------------

    def _past(self, op: Op) -> None:
        """A forward and a backward past the wrapper, perhaps on one rank alone."""
        net, wrapped, _ = self._of(op)
        if self.rank in op["ranks"]:
            with _in_thread() if op.get("thread") else nullcontext():
                with wrapped.no_sync() if op.get("local") else nullcontext():
                    x = self._batch().requires_grad_()
                    self._forward(wrapped.module, op, x).backward()
                    self.seen["input"] = bits(x.grad)
                    self.seen["grads"] = [bits(p.grad) for p in net.parameters()]
        if op.get("zero"):
            wrapped.zero_grad()

    def _zero(self, op: Op) -> None:
        net, wrapped, optimizer = self._of(op)
        if op.get("by") != "own":
            wrapped.zero_grad(set_to_none=op.get("set_to_none", True))
        elif op.get("set_to_none"):
            optimizer.zero_grad(set_to_none=True)
        else:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach().zero_()

    def _optimize(self, op: Op) -> None:
        _, _, optimizer = self._of(op)
        if not self.program.in_backward:
            optimizer.step()

    def _chosen(self, op: Op) -> list[nn.Parameter]:
        net = self._of(op)[0]
        return [p for i in op["layers"] for p in net.parameters_of(i)]

    def _none(self, op: Op) -> None:
        for parameter in self._chosen(op):
            parameter.grad = None

    def _hand(self, op: Op) -> None:
        for parameter in self._chosen(op):
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, self.rank + 1.0)

    def _data(self, op: Op) -> None:
        for parameter in self._chosen(op):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.data = parameter.grad.data * 0.5

    def _grad(self, op: Op) -> None:
        net, wrapped, _ = self._of(op)
        x = self._batch().requires_grad_()
        loss = self._forward(wrapped, op, x)
        wanted = [x] if op["of"] == "input" else [p for p in net.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=op["kept"])
        self.seen["found"] = [bits(each) for each in found]
        if op["kept"]:
            loss.backward()

    def _infer(self, op: Op) -> None:
        _, wrapped, _ = self._of(op)
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "unused": nullcontext}
        with modes[op["how"]]():
            self.seen["out"] = bits(wrapped(self._batch()))

    def _freeze(self, op: Op) -> None:
        for parameter in self._chosen(op):
            parameter.requires_grad_(False)

    def _thaw(self, op: Op) -> None:
        net = self._of(op)[0]
        for i in op["layers"]:
            for parameter in net.parameters_of(i):
                if self.program.layers[i].trained or self.program.wild:
                    parameter.requires_grad_(True)

    def _watch(self, op: Op) -> None:
        net = self._of(op)[0]
        self._hooks += 1
        name = f"hook {self._hooks}"
        for i in op["layers"]:
            if op["how"] in ("module", "forward"):
                self._watch_layer(net.layers[i], op["how"], f"{name} of {i}")
                continue
            if op["how"] == "layer, others":
                act = self._on_others(net, op["act"], name)
                net.layers[i].register_full_backward_hook(lambda *_, act=act: act(None))
                continue
            for j, parameter in enumerate(p for p in net.parameters_of(i) if p.requires_grad):
                if op["how"] == "others":
                    parameter.register_post_accumulate_grad_hook(self._on_others(net, op["act"], name))
                else:
                    self._watch_parameter(parameter, op["how"], f"{name} of {i}.{j}")

    def _on_others(self, net: Net, act: str, name: str) -> Callable[[torch.Tensor | None], None]:
        """-> a hook that uses gradients that have arrived in this backward, or are to arrive."""

        def hook(own: torch.Tensor | None) -> None:
            for parameter in net.parameters():
                if parameter is not own and parameter.grad is not None:
                    self._note(name, parameter.grad)
                    if act == "scale":
                        parameter.grad.mul_(3)
                    elif act == "drop":
                        parameter.grad = None

        return hook

    def _watch_layer(self, layer: nn.Module, how: str, name: str) -> None:
        if how == "module":
            layer.register_full_backward_hook(lambda *_: self._note(name))
        else:
            layer.register_forward_hook(lambda _layer, _given, out: out * 1)

    def _watch_parameter(self, parameter: nn.Parameter, how: str, name: str) -> None:
        def after(changed: torch.Tensor) -> None:
            self._note(name, changed.grad)
            if how == "train":  # an optimizer in the backward, as scripts write it
                with torch.no_grad():
                    changed.sub_(changed.grad, alpha=0.01)
            if how in ("clear", "train"):
                changed.grad = None

        if how == "double":
            parameter.register_hook(lambda gradient: gradient * 2)
        elif how == "see":
            parameter.register_hook(lambda gradient: self._note(name, gradient))
        else:
            parameter.register_post_accumulate_grad_hook(after)

    def _note(self, name: str, tensor: torch.Tensor | None = None) -> None:
        self.seen.setdefault(name, []).append(bits(tensor))

    def _buffer(self, op: Op) -> None:
        net = self._of(op)[0]
        if self.rank == op["rank"]:
            for buffer in net.buffers():
                if buffer.is_floating_point():
                    buffer.add_(1.5)

    def _hold(self, op: Op) -> None:
        """Keep gradients in the ways that a script may keep them."""
        for i, parameter in enumerate(self._chosen(op)):
            grad = parameter.grad
            if grad is None or grad.is_sparse:
                continue
            ways: list[Callable[[torch.Tensor], Any]] = [
                lambda g: g,
                lambda g: g.detach(),
                lambda g: g.data,
                lambda g: (g.untyped_storage(), g.dtype),
                lambda g: g[..., :1],
                lambda g: dlpack.from_dlpack(dlpack.to_dlpack(g.detach())),
            ]
            if self.program.dtype in ("float32", "float64"):
                ways.append(lambda g: g.detach().numpy())
            if self.program.options["gradient_as_bucket_view"]:
                del ways[3]  # the memory is that of a whole bucket
            self._held.append(ways[(i + self.program.seed) % len(ways)](grad))

    def _clip(self, op: Op) -> None:
        net = self._of(op)[0]
        if not any(p.grad is not None and p.grad.is_sparse for p in net.parameters()):
            self.seen["norm"] = bits(nn.utils.clip_grad_norm_(net.parameters(), 1.0))

    def _rewrap(self, op: Op) -> None:
        n = op.get("wrapper", 0) % len(self.nets)
        if not self.program.in_backward:
            self.wrapped[n] = self._wrapped(self.nets[n])

    def _copy(self, op: Op) -> None:
        net = self._of(op)[0]
        other = copy.deepcopy(net)
        self._forward(other, {}, self._batch().requires_grad_()).backward()
        self.seen["copied"] = [bits(p.grad) for p in other.parameters()]
        net.load_state_dict(other.state_dict())

    def _mode(self, op: Op) -> None:
        self._of(op)[1].train(op["train"])

    def _join(self, op: Op) -> None:
        _, wrapped, optimizer = self._of(op)
        with Join([wrapped], divide_by_initial_world_size=op["initial"]):
            for _ in range(op["inputs"][self.rank]):
                self._forward(wrapped, {}, self._batch()).backward()
                if not self.program.in_backward:
                    optimizer.step()
                    optimizer.zero_grad()

    def _nothing(self, _op: Op) -> None:
        gc.collect()


def bits(value: Any) -> Any:
    """What two runs must have in common: type, shape and bits of a tensor. A NaN is a NaN."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        value = _of_storage(*value) if isinstance(value, tuple) else torch.as_tensor(value)
    about = (str(value.dtype), tuple(value.shape), value.is_sparse)
    value = value.detach()
    dense = value.to_dense() if value.is_sparse else value
    flat = dense.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.is_floating_point() and flat.isnan().any():
        flat = torch.where(flat.isnan(), torch.nan, flat)
    raw = flat.view(torch.uint8).numpy().tobytes()
    if len(raw) <= _MOST_BYTES:
        return about, raw, b""
    signless = torch.where(flat == 0, torch.zeros_like(flat), flat).view(torch.uint8).numpy().tobytes()
    return about, raw[:_MOST_BYTES], hashlib.md5(signless).digest()


def _of_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage)


def _depth(local: str, part: str) -> int:
    return {"": 0, "all": 1, "nested": 2}.get(local, int(local == part))


_noisy = nn.Sequential(*[nn.Linear(48, 48) for _ in range(6)])


@contextmanager
def _in_thread() -> Iterator[None]:
    """Meanwhile another thread runs backwards of a model that has nothing to do with this one."""
    over = threading.Event()
    begun = threading.Event()

    def train() -> None:
        while not over.is_set():
            _noisy(torch.ones(4, 48)).sum().backward()
            _noisy.zero_grad()
            begun.set()

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _in_another_thread(action: Callable[[], None]) -> None:
    raised = list[BaseException]()

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def _hook(name: str, group: Any) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    hooks = {
        "own": _own_hook,
        "all_reduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "noop": debugging_hooks.noop_hook,
    }
    return group, hooks[name]


def _own_hook(group, bucket):  # torch checks annotations
    """A hook as a user writes one: it averages a copy, halved."""
    half = bucket.buffer().div(2 * group.size())
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 1)
