"""The network, and its gradient as one process with the whole batch would compute it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL_SEED = 1234


class DigitsNet(nn.Sequential):
    """A small convolutional network for 8 x 8 images.

    It has no dropout and no batch norm, so that its gradient is a plain sum over examples. Its functions are
    smooth (SiLU, mean pooling): a ReLU whose input is within rounding of 0 may open in one process and not in
    another, and the comparison of gradients would show that instead of the divisor.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.SiLU(),
            nn.Linear(64, 10),
        )
        # Torch's own initial weights are so small for this network that it learns nothing for two epochs.
        for layer in self:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight)


def build_model() -> DigitsNet:
    """The network with the same initial parameters in every process."""
    torch.manual_seed(MODEL_SEED)
    return DigitsNet()


def sum_of_losses(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy, summed over the examples."""
    return F.cross_entropy(model(images), labels, reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradient of each parameter, in the model's order."""
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one tensor."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients(model)])


class WholeBatchReference:
    """A plain copy of a model that computes the gradient of the mean loss over a whole batch, by itself."""

    def __init__(self) -> None:
        self._model = build_model()

    def gradient(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """The flat gradient at the parameters that `model` has now."""
        self._model.load_state_dict(model.state_dict())
        self._model.zero_grad(set_to_none=True)
        (sum_of_losses(self._model, images, labels) / len(labels)).backward()
        return flat_gradient(self._model)
