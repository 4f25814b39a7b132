"""Check that the wrapped module still has the parameters that it had when it was wrapped.

The gradient of a parameter that is unfrozen or added later would stay local. An unfrozen one gets a place in a bucket
(`replanning`). An added one is an error: the ranks may have created it with different values. The check reads the
frozen parameters before every forward, which is cheap. It walks the whole module only if any module of the process has
registered a parameter or a child since the last walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as registration

from ddp.reducer import errors

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import torch

_registrations = 0
_counting = False


def _count(*_what: Any) -> None:
    global _registrations
    _registrations += 1


def _count_registrations() -> None:
    global _counting
    if not _counting:
        _counting = True
        registration.register_module_parameter_registration_hook(_count)
        registration.register_module_module_registration_hook(_count)


class ModuleCheck:
    """The parameters of a module when it was wrapped, and the check that they are still the same."""

    def __init__(
        self, module: torch.nn.Module, averaged: Iterable[torch.Tensor], ignored: Container[str]
    ) -> None:
        _count_registrations()
        self._seen = _registrations
        self._module = module
        self._ignored = ignored
        self._averaged = {id(parameter) for parameter in averaged}
        self._others = [
            (name, parameter) for name, parameter in self._unaveraged() if not parameter.requires_grad
        ]

    def _unaveraged(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._averaged and name not in self._ignored
        ]

    def unfrozen(self, rank: int) -> list[str]:
        """Return the parameters that were unfrozen since. Raise if parameters were added."""
        if self._seen != _registrations:
            known = {id(parameter) for _, parameter in self._others}
            new = [(n, p) for n, p in self._unaveraged() if id(p) not in known]
            if added := [name for name, parameter in new if parameter.requires_grad]:
                raise errors.changed_module(added, rank, "parameters were added")
            self._others += new
            self._seen = _registrations
        return [name for name, parameter in self._others if parameter.requires_grad]
