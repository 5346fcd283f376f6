"""What a factor means: the mistake behind each name, its remedy, and what the factor does to an optimizer.

Sources of the effects: Kingma and Ba 2015, section 2.1 (Adam's step does not change with the gradient's scale);
Loshchilov and Hutter 2019 (decoupled weight decay); docs/normalization.md, where they are run.
"""

from __future__ import annotations

import math

import numpy as np

from .factors import matches
from .measured import Measured

# By symbol: the mistake, and what to do about it.
_MEANINGS: dict[str, tuple[str, str]] = {
    "1/n": (
        "the loss is already divided by the global batch and the reduction averaged again",
        "use SUM",
    ),
    "n": (
        "the ranks' means were added up, or a mean was multiplied by the number of ranks and nothing averaged it",
        "use MEAN, and leave out any multiplication by n",
    ),
    "1/N": (
        "the loss or the gradient was divided by the number of micro-batches twice",
        "divide by N once",
    ),
    "N": (
        "the micro-batches' means were added up and never divided by their number",
        "divide each loss by N, or sum the losses and use DIVIDE_BY_COUNT",
    ),
    "k": (
        "the micro-batches' means were added up and never divided by their number",
        "divide by the k micro-batches that ran, or sum the losses and use DIVIDE_BY_COUNT",
    ),
    "1/k": (
        "the loss or the gradient was divided by the number of micro-batches twice",
        "divide by k once",
    ),
    "k/N": (
        "the group is short, and it was divided by the N micro-batches that were planned",
        "divide by the k that ran (DIVIDE_BY_COUNT counts them), or drop the remainder, which loses its data",
    ),
    "K/(n N)": (
        "the group is short, and it was divided by the n N micro-batches that were planned",
        "divide by the K that ran (DIVIDE_BY_COUNT counts them), or drop the remainder, which loses its data",
    ),
    "B/(n N m)": (
        "the group is short, and it was divided by the samples that were planned",
        "divide by the B that it had (DIVIDE_BY_COUNT counts them), or drop the remainder, which loses its data",
    ),
    "m": (
        "the losses of a micro-batch were summed and then divided by the number of micro-batches only",
        "take the mean of each micro-batch, or divide by the samples once: DIVIDE_BY_COUNT",
    ),
    "1/m": (
        "the mean of a micro-batch was divided by its size again",
        "divide by m once",
    ),
    "c": (
        "the losses of a micro-batch's tokens were summed and then divided by the number of micro-batches only",
        "take the mean over the tokens, or divide by their number once: DIVIDE_BY_COUNT",
    ),
    "1/c": (
        "the mean over a micro-batch's tokens was divided by their number again",
        "divide by c once",
    ),
    "B": (
        "the sum over all samples was never divided",
        "use divide_by(B) or DIVIDE_BY_COUNT",
    ),
    "1/B": (
        "it was divided by the global batch twice, in the loss and after it",
        "use SUM with this loss, or sum the loss and keep the division of the reduction",
    ),
    "B/n": (
        "the ranks' sums were averaged over n instead of divided by B",
        "use divide_by(B) or DIVIDE_BY_COUNT",
    ),
    "n/B": (
        "the ranks' means were divided by the global batch where their number n belongs",
        "use MEAN",
    ),
    "T": (
        "the sum over all counted tokens was never divided",
        "use divide_by(T) or DIVIDE_BY_COUNT",
    ),
    "1/T": (
        "it was divided by the total count twice, in the loss and after it",
        "use SUM with this loss, or sum the loss and keep the division of the reduction",
    ),
    "T/n": (
        "the ranks' sums were averaged over n instead of divided by T",
        "use divide_by(T) or DIVIDE_BY_COUNT",
    ),
    "n/T": (
        "the ranks' means were divided by the total count where their number n belongs",
        "use MEAN",
    ),
    "n N": (
        "the micro-batches' means were added up over the micro-batches and the ranks, and never divided",
        "divide by N and use MEAN, or sum the losses and use DIVIDE_BY_COUNT",
    ),
    "1/(n N)": (
        "the loss is already divided by the global batch, and was divided by N and averaged over n again",
        "use SUM, and do not divide by N",
    ),
    "1/n^2": (
        "the loss is already divided by the global batch, and the average over the ranks was taken twice more",
        "use SUM, once",
    ),
    "n^2": (
        "the ranks' means were added up, and multiplied by the number of ranks as well",
        "use MEAN, once",
    ),
    "T/B": (
        "the sum over counted tokens was divided by the number of samples",
        "let the count be the tokens that are not ignored: DIVIDE_BY_COUNT",
    ),
    "T/(n B)": (
        "the sum over counted tokens was divided by the number of samples, and averaged over n again",
        "let the count be the tokens that are not ignored: DIVIDE_BY_COUNT",
    ),
    "-1": (
        "the sign is flipped",
        "step against the gradient of the loss, not along it",
    ),
}
_OTHER = (
    "a product of several divisions, or of missing ones",
    "divide exactly once: sum the losses, count what they are over, and use DIVIDE_BY_COUNT",
)


def meaning(symbol: str) -> tuple[str, str]:
    """The mistake that gives a named factor, and its remedy. ``symbol`` as in ``factors.Name``: ``n/B``."""
    if symbol.startswith("-") and symbol != "-1":
        mistake, remedy = meaning(symbol[1:])
        return f"the sign is flipped, and {mistake}", remedy
    return _MEANINGS.get(symbol, _OTHER)


def effects(factor: float) -> tuple[str, str, str]:
    """What a gradient of ``factor`` times the right one does: to Adam, to weight decay, to a clipping threshold."""
    if not math.isfinite(factor) or factor == 0:
        return (
            "Adam: no step follows the loss.",
            "Decoupled weight decay: it goes on without a gradient against it.",
            "Clipping: no threshold can repair it.",
        )
    if factor == 1:
        return (
            "Adam: as it should be.",
            "Decoupled weight decay: as it should be.",
            "Clipping: as it should be.",
        )
    size, inverse = f"{abs(factor):.4g}", f"{1 / abs(factor):.4g}"
    signs = " The sign does not cancel: it climbs." if factor < 0 else ""
    more = "less" if abs(factor) < 1 else "more"
    guard = (
        "the guard against spikes is weaker" if abs(factor) < 1 else "a step that it cuts hides the factor"
    )
    return (
        f"Adam divides by the root of its mean square, so a constant factor of {size} cancels and hides, except that "
        f"eps acts as if it were {inverse} times as large (and a factor that changes from step to step does not "
        f"cancel).{signs}",
        f"Decoupled weight decay keeps its size, as Adam's step does, so AdamW's balance stays; but SGD's step is "
        f"{size} times as large, so beside it any decay is {inverse} times as strong, and so is L2 decay that is "
        f"added to the gradient, in Adam too.",
        f"A clipping threshold c acts on the right gradient as c / {size} = {inverse} c would: it cuts {more} often, "
        f"and {guard}.",
    )


def logged_loss(measured: Measured) -> str:
    """A sentence on the loss that the step logs, beside the mean loss over all counts. Empty if no rank logs one."""
    values = [value for value in measured.logged if value is not None]
    if not values:
        return ""
    if not (math.isfinite(measured.loss) and measured.loss != 0 and all(map(math.isfinite, values))):
        return (
            f"The logged loss, {values[0]:.6g}, cannot be compared with a mean loss of {measured.loss:.6g}."
        )
    size = max(abs(measured.loss), *map(abs, values))
    mean = float(np.mean(values))
    alike = max(values) - min(values) <= measured.tolerance * size
    who = "The logged loss" if alike else "The mean of the ranks' logged losses"
    prefix = ""
    if not alike:
        prefix = f"The ranks log different losses, {min(values):.6g} to {max(values):.6g}: each its own. "
    factor = mean / measured.loss
    names = matches(factor, measured.sizes, measured.tolerance)
    if abs(factor - 1) <= measured.tolerance:
        return f"{prefix}{who} is right: {mean:.6g}, the mean over the whole batch."
    named = "".join(f" = {name}" for name in names)
    question = (
        "" if names else ", which is no product of the sizes: is it the loss of one rank or micro-batch?"
    )
    end = question or "."
    return (
        f"{prefix}{who} is {factor:.4g}{named} times the mean over the whole batch, {measured.loss:.6g}{end}"
    )
