"""Find parameters of the wrapped module that were unfrozen or added after wrapping: nobody averages their gradients.

The check reads the frozen parameters before every forward, which is cheap. It walks the whole module only if any module
of the process has registered a parameter or a child since the last walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as registration

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
    """The parameters of a module that are not averaged."""

    def __init__(
        self, module: torch.nn.Module, averaged: Iterable[torch.Tensor], ignored: Container[str]
    ) -> None:
        _count_registrations()
        self._seen = _registrations
        self._module = module
        self._ignored = ignored
        self._averaged = {id(parameter) for parameter in averaged}
        self._others = self._unaveraged()

    def _unaveraged(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._averaged and name not in self._ignored
        ]

    def not_averaged(self) -> list[str]:
        """Return the parameters that were unfrozen or added since the module was wrapped."""
        if self._seen != _registrations:
            self._seen, self._others = _registrations, self._unaveraged()
        return [name for name, parameter in self._others if parameter.requires_grad]
