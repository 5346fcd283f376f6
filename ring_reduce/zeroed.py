"""A watch for gradients that were reduced and not zeroed: a sum over ranks is not to be summed over ranks again."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from .normalization import Kind

if TYPE_CHECKING:
    from .ddp import RingHookState

# A mean over ranks of what is equal on all ranks is itself: a second backward then adds up right.
_IDEMPOTENT = (Kind.MEAN, Kind.WEIGHTED_MEAN)


def watch(model: Any, state: RingHookState) -> None:
    """Looks at each parameter of a DDP model when a backward is about to add to its gradient."""
    if state.normalization.kind not in _IDEMPOTENT:
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(_Watch(state, name, parameter))


class _Watch:
    """Of one parameter. A warning and no error: a gradient that is thrown away, as a GAN's discriminator gets in the
    step of its generator, may be wrong."""

    def __init__(self, state: RingHookState, name: str, parameter: Any) -> None:
        self._state = state
        self._name = name
        self._parameter = parameter
        self._seen = 0  # reductions that were followed by a look

    def __call__(self, gradient: Any) -> None:
        if self._seen == self._state.reductions:
            return
        self._seen = self._state.reductions
        old = self._parameter.grad
        if old is None or old.count_nonzero() == 0 or self._state.warned == self._seen:
            return
        self._state.warned = self._seen
        warnings.warn(
            f"rank {self._state.ring.rank}: the gradient of {self._name} was reduced by the last backward and not "
            f"zeroed, and this one adds to it: under {self._state.normalization!r} it will be summed over the ranks "
            f"again; call optimizer.zero_grad() after each step, or accumulate under no_sync()",
            stacklevel=2,
        )
