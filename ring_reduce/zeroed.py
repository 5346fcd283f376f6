"""A watch for gradients that were reduced and not zeroed: a sum over ranks is not to be summed over ranks again."""
# No annotations of torch's classes: they would have to be imported.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .ending import abort_on_error
from .normalization import Kind

if TYPE_CHECKING:
    from .ddp import RingHookState

# A mean over ranks of what is equal on all ranks is itself: a second backward then adds up right.
_IDEMPOTENT = (Kind.MEAN, Kind.WEIGHTED_MEAN)


def watch(model: Any, state: RingHookState) -> None:
    """Looks at the gradients of a DDP model when a backward begins, if one was reduced before."""
    if state.normalization.kind not in _IDEMPOTENT:
        model.register_forward_hook(_Watch(state).after_forward)


class _Watch:
    def __init__(self, state: RingHookState) -> None:
        self._state = state
        self._looked_at = 0  # reductions that were followed by a look

    def after_forward(self, model: Any, inputs: Any, output: Any) -> None:
        """Not in the forward itself: many zero the gradients between forward and backward."""
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._look(model))

    def _look(self, model: Any) -> None:
        """At the start of a backward: no parameter has got its gradient yet."""
        if self._state.reductions == self._looked_at:
            return
        with abort_on_error(self._state.ring):
            for name, parameter in model.module.named_parameters():
                if parameter.grad is not None and parameter.grad.count_nonzero() > 0:
                    raise RuntimeError(
                        f"rank {self._state.ring.rank}: the gradient of {name} was reduced by the last backward and "
                        f"not zeroed: under {self._state.normalization!r} this one would sum it over the ranks again; "
                        f"call optimizer.zero_grad() after each step, or accumulate under no_sync()"
                    )
        self._looked_at = self._state.reductions
