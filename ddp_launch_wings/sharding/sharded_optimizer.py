"""`ShardedOptimizer`: wraps an elementwise optimizer so that each rank keeps only its share of the state.

    model = DistributedDataParallel(module)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)

In the backward, DDP reduce-scatters its buckets instead of all-reducing them, as soon as they are full. `step()`
updates this rank's shards and all-gathers the parameters. Together these send as many bytes as an all-reduce. The
results equal those of the unsharded optimizer, because each element's step is independent of the others.

Differences for the user: after a backward `.grad` is None. A rank has only the average of its shard, in the gradients
of `optimizer.param_groups`. Clip gradients with `optimizer.clip_grad_norm_()`, and use ShardedGradScaler (of
torch.distributed.fsdp.sharded_grad_scaler) as the GradScaler.
`step()` consumes the gradients. Under `no_sync()`, whole gradients accumulate in `.grad` as usual. The constructor
moves the parameters into flat storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from ddp.comm_hooks.plain import completed
from ddp.groups.single_tensor import all_gather, reduce_scatter
from ddp.reducer.bucket_sender import gradient_strides, like_gradient
from ddp.reducer.module import DistributedDataParallel
from ddp.reducer.torch_reducer import reducer_of
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.comm_error import explaining
from ddp_launch_wings.sharding.shards import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddp.reducer.grad_bucket import GradBucket
    from ddp.reducer.reducer import Reducer

# --- which models, parameters and optimizers are accepted ------------------------------------------
#
# The arguments of a `ShardedOptimizer`: what it accepts, and the error for what it does not.

_ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
}


def groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups from the forms that torch accepts: parameters, (name, parameter) pairs, or groups."""
    given = list(params)
    found = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _tensors(group["params"])} for group in found]


def _tensors(params: Any) -> list[torch.Tensor]:
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return [each[1] if isinstance(each, tuple) else each for each in listed]


def check(model: Any, optimizer_class: type[Optimizer], elementwise: bool) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise WrongType(
            f"ShardedOptimizer needs a ddp.DistributedDataParallel, but got a {type(model).__name__}. Wrap the model "
            "first"
        )
    reducer_of(model, "ShardedOptimizer")
    if model.mixed_precision is not None:
        raise WrongValue("ShardedOptimizer does not support DDP's mixed_precision. Use torch.autocast")
    name = optimizer_class.__name__
    torchs = optimizer_class.__module__.startswith("torch.optim")
    if not elementwise and not (torchs and name in _ELEMENTWISE):
        raise WrongValue(
            f"ShardedOptimizer splits parameters at any element, but it is not known whether {name} updates each "
            "element independently. "
            f"If it does, pass elementwise=True. Otherwise use one of {', '.join(sorted(_ELEMENTWISE))}"
        )


# --- parameters in one buffer ----------------------------------------------------------------------
#
# The buckets of a sharded optimizer: all parameters side by side, and this rank's shard of their gradients.
#
# A bucket moves its parameters into one flat tensor, in the order and layout that their gradients have in DDP's
# bucket. A shard is therefore a slice. Gradients are reduce-scattered from DDP's bucket, and parameters are all-
# gathered in place. The optimizer receives pieces of parameters, as one-dimensional tensors.


class ShardedBucket:
    """One bucket of DDP with its parameters in a flat tensor."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, averages: bool) -> None:
        """Move the parameters into the flat tensor.

        `averages`: whether the process group divides the sums. If false, the gradients were divided before.
        """
        self.parameters = list(parameters)
        self._group, self._averages = group, averages
        self._world = group.size()
        sizes = [parameter.numel() for parameter in self.parameters]
        self.shard = shard(sizes, self._world, group.rank())
        like = self.parameters[0]
        self._room = self.shard.size * self._world
        self._flat = torch.zeros(self._room, dtype=like.dtype, device=like.device)
        self._move_in(sizes)
        self._own = self._flat[self.shard.begin : self.shard.begin + self.shard.size]
        self.pieces = [self._own[p.offset : p.offset + p.end - p.start] for p in self.shard.pieces]
        self._coming: torch.Tensor | None = None
        self._work: Any = None

    def _move_in(self, sizes: Sequence[int]) -> None:
        offset = 0
        self._places = []
        for parameter, size in zip(self.parameters, sizes, strict=True):
            place = self._flat.as_strided(parameter.shape, gradient_strides(parameter), offset)
            place.copy_(parameter.detach())
            parameter.data = place
            self._places.append(place.data_ptr())
            offset += size

    def moved_out(self) -> int | None:
        """Return the first parameter that has left the flat tensor, for example by `module.to()` or `.data =`."""
        for i, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if parameter.data_ptr() != place and parameter.numel():
                return i
        return None

    # --- gradients ---------------------------------------------------------------------------------

    def scatter(self, buffer: torch.Tensor) -> None:
        """Launch the reduce-scatter of a bucket's gradients."""
        # New memory in each step: an optimizer or the script may keep the gradients of earlier steps.
        self._coming = torch.empty_like(self._own)
        given = _real(self._pad(buffer))
        self._work = reduce_scatter(_real(self._coming), given, self._group, self._averages)

    def _pad(self, buffer: torch.Tensor) -> torch.Tensor:
        storage, begin = buffer.untyped_storage(), buffer.storage_offset()
        if storage.nbytes() >= (begin + self._room) * buffer.element_size():
            return buffer.as_strided((self._room,), (1,), begin)
        padded = buffer.new_zeros(self._room)
        padded[: buffer.numel()].copy_(buffer)
        return padded

    def take(self, used: Callable[[int, torch.Tensor], bool]) -> None:
        """Wait for this rank's shard. Store it in the `.grad` of the pieces, or add it if `.grad` exists."""
        came, self._coming, work, self._work = self._coming, None, self._work, None
        if came is not None:
            work.wait()
            for piece, described in zip(self.pieces, self.shard.pieces, strict=True):
                gradient = came[described.offset : described.offset + piece.numel()]
                if not used(described.member, gradient):
                    continue
                if piece.grad is None:
                    piece.grad = gradient
                else:
                    piece.grad.add_(gradient)
        for parameter in self.parameters:
            parameter.grad = None

    # --- parameters --------------------------------------------------------------------------------

    def gather(self) -> Any:
        """Launch the all-gather of the parameters. -> Work"""
        return all_gather(_real(self._flat), _real(self._own), self._group)


def _real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


# --- state of shards, and of whole parameters ------------------------------------------------------
#
# Split the optimizer state of whole parameters into the state of their pieces, and join it again.

# State entries of torch's optimizers that are one number for a whole parameter.
_OF_THE_WHOLE = {"step", "mu_product", "eta", "mu"}


def cut(state: Mapping[str, Any], parameter: torch.Tensor, start: int, end: int) -> dict[str, Any]:
    """Return the part of a parameter's state for its elements [start, end), in memory order."""
    return {name: _cut(name, value, parameter, start, end) for name, value in state.items()}


def _cut(name: str, value: Any, parameter: torch.Tensor, start: int, end: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_elementwise(name, tuple(value.shape), parameter):
        return _flat(value, parameter)[start:end].clone()
    return value.clone()  # a copy: otherwise the step would also increment the counter in the caller's state


def is_elementwise(name: str, shape: tuple[int, ...], parameter: torch.Tensor) -> bool:
    """Whether an entry of a whole parameter's state has a number for each element of the parameter."""
    return name not in _OF_THE_WHOLE and shape == tuple(parameter.shape)


def _flat(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    laid_out = like_gradient(parameter, value).copy_(value)
    return laid_out.as_strided((value.numel(),), (1,))


def put_together(
    pieces: Iterable[tuple[int, int, Mapping[str, Any]]], parameter: torch.Tensor
) -> dict[str, Any]:
    """Join the states of all pieces of a parameter, given as (start, end, state), into the parameter's state."""
    whole: dict[str, Any] = {}
    for start, end, state in pieces:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != (end - start,) or name in _OF_THE_WHOLE:
                whole[name] = value
                continue
            if name not in whole:
                whole[name] = like_gradient(parameter, value)
            whole[name].as_strided((parameter.numel(),), (1,))[start:end] = value
    return whole


# --- the optimizer ---------------------------------------------------------------------------------


class ShardedOptimizer(Optimizer, Joinable):
    """An optimizer that shards its state by the buckets of a DDP model.

    `params`: parameters or parameter groups, by default all parameters of the model. They must include every parameter
    that the model averages. An optimizer that is not part of torch needs `elementwise=True`. It must update each
    element independently of all others.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        check(model, optimizer_class, elementwise)
        self._model = model
        self._group: dist.ProcessGroup = model.process_group
        self._groups = groups(model.parameters() if params is None else params)
        self._whole = [parameter for group in self._groups for parameter in group["params"]]
        self._check_parameters()
        self._lay_out()
        self._local: Any = optimizer_class(self._groups_of_pieces(), **defaults)
        self._consolidated: dict[str, Any] | None = None
        self._averaged = self._made = False
        super().__init__(self._local.param_groups, self._local.defaults)
        Joinable.__init__(self)
        self._share()

    # --- construction ------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        reducer = self._model.reducer.core
        given = {id(parameter) for parameter in self._whole}
        for name, parameter, facts in zip(
            reducer.names, reducer.parameters, reducer.sender.facts, strict=True
        ):
            if facts.sparse:
                raise WrongValue(
                    f"cannot shard the gradient of {name!r}: it is sparse. Use a dense embedding (sparse=False), or "
                    "exclude the parameter with ignore_parameters_and_buffers() (its gradient is then not averaged)"
                )
            if id(parameter) not in given:
                raise WrongValue(
                    f"the parameter {name!r} of the model is not in this optimizer, so its gradient would be lost. Add "
                    "it (with lr=0 to keep it unchanged), or freeze it before wrapping"
                )
        averaged = {id(parameter) for parameter in reducer.parameters}
        for i, parameter in enumerate(self._whole):
            if parameter.requires_grad and id(parameter) not in averaged:
                raise WrongValue(
                    f"parameter {i} of `params` is not a trainable parameter of the model. Remove it from `params`"
                )

    @explaining("the layout of shards")
    def _lay_out(self) -> None:
        reducer = self._model.reducer.core
        order = _first_order(reducer)
        if reducer.rebuilt:  # DDP has observed a backward
            order = [i for bucket in reducer.sender.plan.buckets for i in bucket.members]
        self._model.register_comm_hook(self, _scatter)
        self._cut(order)

    def _cut(self, order: Sequence[int]) -> None:
        """Fix the buckets of the model in this order, and cut each of them into shards."""
        reducer = self._model.reducer.core
        averages = reducer.sender.set_shard_receiver(self._take)
        reducer.rebuild(order)
        self._plan = reducer.sender.plan
        self.buckets = [
            ShardedBucket([reducer.parameters[i] for i in bucket.members], self._group, averages)
            for bucket in self._plan.buckets
        ]

    def _pieces(self) -> list[tuple[torch.Tensor, int, int, torch.Tensor]]:
        """Return (parameter, start, end, piece) for every piece that this rank owns."""
        return [
            (bucket.parameters[described.member], described.start, described.end, piece)
            for bucket in self.buckets
            for described, piece in zip(bucket.shard.pieces, bucket.pieces, strict=True)
        ]

    def _groups_of_pieces(self) -> list[dict[str, Any]]:
        """Return the parameter groups with pieces in place of parameters, in the same order."""
        of: dict[int, list[torch.Tensor]] = {}
        self._numbered: list[tuple[int, int, int]] = []
        number = {id(parameter): i for i, parameter in enumerate(self._whole)}
        found = sorted(self._pieces(), key=lambda each: (number[id(each[0])], each[1]))
        for parameter, start, end, piece in found:
            of.setdefault(id(parameter), []).append(piece)
            self._numbered.append((number[id(parameter)], start, end))
        return [
            {**group, "params": [piece for p in group["params"] for piece in of.get(id(p), [])]}
            for group in self._groups
        ]

    def _share(self) -> None:
        """Expose the wrapped optimizer's groups and state. Schedulers and GradScaler read and change them."""
        self.param_groups = self._local.param_groups
        self.state = self._local.state
        self._made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise WrongUse(
                "ShardedOptimizer does not support add_param_group(). Create a new model wrapper and optimizer"
            )
        super().add_param_group(param_group)

    def start_anew(self) -> None:
        """Cut shards for the group that was formed again; it may have another size. Their state begins empty.

        A rank was lost, and its share with it. So the shares of all ranks come from a commit (`ddp.elastic`).
        """
        self._group = self._model.process_group
        self._cut(_first_order(self._model.reducer.core))
        for group, cut in zip(self._local.param_groups, self._groups_of_pieces(), strict=True):
            group["params"] = cut["params"]
        self._local.state.clear()
        self._share()
        self._averaged, self._consolidated = False, None

    # --- a step ------------------------------------------------------------------------------------

    def _take(self, number: int, used: Callable[[int, torch.Tensor], bool]) -> None:
        self._averaged = True
        self.buckets[number].take(used)

    @explaining("the step of a ShardedOptimizer")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step()
        self._local.step()
        with torch.no_grad():
            # Gather the last bucket first: it holds the first layers, which the next forward needs first.
            for work in [bucket.gather() for bucket in reversed(self.buckets)]:
                work.wait()
        self._drop()
        return loss

    def _check_step(self) -> None:
        reducer = self._model.reducer.core
        if reducer.sender.plan is not self._plan:
            raise WrongUse(
                "the model's buckets were rebuilt after this optimizer was created. Save the state, create the model "
                "wrapper and the optimizer again, and load the state"
            )
        for described, bucket in zip(self._plan.buckets, self.buckets, strict=True):
            moved = bucket.moved_out()
            if moved is not None:
                raise WrongUse(
                    f"the storage of the parameter {reducer.names[described.members[moved]]!r} was replaced after this "
                    "optimizer was created, so it would not be trained. Move or convert the module before wrapping it"
                )
        if not self._averaged and any(parameter.grad is not None for parameter in reducer.parameters):
            raise WrongUse(
                "step() was called, but all backwards ran under no_sync(), so no gradient was averaged. Run the last "
                "backward before step() outside no_sync()"
            )

    def _drop(self) -> None:
        self._averaged = False
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._drop()
        self._model.zero_grad(set_to_none)

    @torch.no_grad()
    @explaining("the clipping of gradients")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip like torch.nn.utils.clip_grad_norm_. All ranks must call it. -> the norm of all gradients"""
        gradients = [piece.grad for *_, piece in self._pieces() if piece.grad is not None]
        device = self._model.reducer.core.sender.device
        norms = [
            torch.linalg.vector_norm(each, norm_type, dtype=_wide(each)).to(device) for each in gradients
        ]
        most = norm_type == float("inf")
        wide = torch.float64 if device.type == "cpu" else torch.float32
        total = torch.zeros((), dtype=wide, device=device)
        if norms:
            stacked = torch.stack(norms).to(total.dtype)
            total = stacked.max() if most else stacked.pow(norm_type).sum()
        dist.all_reduce(total, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM, group=self._group)
        total = total if most else total.pow(1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return total

    # --- the state ---------------------------------------------------------------------------------

    @explaining("the consolidation of an optimizer's state")
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on the rank `to`, for `state_dict()` there. All ranks must call it."""
        state = self._local.state
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        mine = [
            (number, start, end, dict(state[piece]))
            for (number, start, end), piece in zip(self._numbered, pieces, strict=True)
            if piece in state
        ]
        here = dist.get_rank(self._group) == to
        states: list[Any] | None = [None] * self._group.size() if here else None
        dist.gather_object(mine, states, dist.get_global_rank(self._group, to), self._group)
        self._consolidated = self._put_together(states) if states is not None else None

    def _put_together(self, states: Sequence[Any]) -> dict[str, Any]:
        of: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
        for number, start, end, state in (each for of_rank in states for each in of_rank):
            of.setdefault(number, []).append((start, end, state))
        whole = {i: put_together(of[i], self._whole[i]) for i in sorted(of)}
        return {"state": whole, "param_groups": self.numbered_groups()}

    def numbered_groups(self) -> list[dict[str, Any]]:
        first, groups = 0, []
        for group, given in zip(self.param_groups, self._groups, strict=True):
            numbers = list(range(first, first + len(given["params"])))
            groups.append({**group, "params": numbers})
            first += len(numbers)
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the unsharded format. It loads with or without sharding, in a world of any size."""
        if self._consolidated is None:
            raise WrongUse(
                "the state is sharded. After the last step(), call consolidate_state_dict(to=R) on all ranks. Then "
                "call state_dict() on rank R"
            )
        saved, self._consolidated = self._consolidated, None
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state, and keep this rank's share. All ranks pass the whole state."""
        groups = state_dict["param_groups"]
        self._check_groups(groups)
        named = [number for group in groups for number in group["params"]]
        state = {
            i: cut(state_dict["state"][named[number]], self._whole[number], start, end)
            for i, (number, start, end) in enumerate(self._numbered)
            if named[number] in state_dict["state"]
        }
        self._load_local(state, groups)

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in self._groups]:
            own = [len(group["params"]) for group in self._groups]
            raise WrongValue(
                f"cannot load the state: its parameter groups have {sizes} parameters, those of this optimizer have "
                f"{own}. Load the state of an optimizer with the same groups"
            )

    def _load_local(self, state: dict[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        local, first = [], 0
        for group, mine in zip(groups, self.param_groups, strict=True):
            local.append({**group, "params": list(range(first, first + len(mine["params"])))})
            first += len(mine["params"])
        state = {number: each for number, each in state.items() if each}
        self._local.load_state_dict({"state": state, "param_groups": local})
        self._share()

    # --- the share of this rank, for ddp.elastic (`ddp.elastic.contents.SharedOut`) -----------------------

    def whole_parameters(self) -> list[torch.Tensor]:
        return self._whole

    def part(self) -> tuple[int, int]:
        return dist.get_rank(self._group), self._group.size()

    def ranges(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Return (number of the parameter, start, end, strides of the parameter) for each piece."""
        return [(*each, tuple(gradient_strides(self._whole[each[0]]))) for each in self._numbered]

    def state_of_ranges(self) -> list[Mapping[str, Any]]:
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        return [self._local.state.get(piece, {}) for piece in pieces]

    def is_elementwise(self, number: int, name: str, shape: tuple[int, ...]) -> bool:
        return is_elementwise(name, shape, self._whole[number])

    def load_ranges(self, states: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Load the states of the pieces, and the settings of the groups."""
        self._check_groups(groups)
        self._load_local(dict(enumerate(states)), groups)

    # --- join --------------------------------------------------------------------------------------

    def join_hook(self, **_given: Any) -> JoinHook:
        return _StepWithoutInput(self)

    @property
    def join_device(self) -> torch.device:
        return self._model.reducer.core.sender.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group


class _StepWithoutInput(JoinHook):
    """Steps for a rank without input, which still owns its shards."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        with torch.no_grad():
            for number in range(len(self._optimizer.buckets)):
                self._optimizer._take(number, _always)
        self._optimizer.step()


def _always(_member: int, _average: torch.Tensor) -> bool:
    return True


def _scatter(state: ShardedOptimizer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Launch a bucket's reduce-scatter, as a communication hook. `take` waits for it at the end of the backward."""
    state.buckets[bucket.index()].scatter(bucket.buffer())
    return completed(bucket.buffer())


def _first_order(reducer: Reducer) -> list[int]:
    """The order of parameters before any backward: about that in which gradients arrive."""
    return list(reversed(range(len(reducer.parameters))))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
