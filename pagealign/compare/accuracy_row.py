"""A row of the accuracy table, and the one place where its errors are worked out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Row:
    """One approach's errors in one case.

    ``level`` is ``attention``, ``model`` or ``server``. Errors are absolute: ``max_error`` and
    ``mean_error`` of ``compared`` numbers against float64, ``plain_*`` those of a plain
    implementation in the same ``dtype`` (PyTorch's operators; for models, transformers).
    ``within``: by the rule in ``kernels.reference``, at most twice the plain maximum and 1.5
    times the plain mean. For models, ``tokens`` were chosen, ``tokens_same`` of them as
    transformers in float64 chooses after the same text; of the ``words`` spoken ``word_errors``
    were heard wrong, left out or put in.
    ``note`` says why a row has no figures (``compared`` is 0 then).
    """

    level: str
    approach: str
    subject: str
    case: str
    dtype: str
    page_size: int
    max_error: float
    mean_error: float
    plain_max_error: float
    plain_mean_error: float
    within: bool
    compared: int
    tokens: int | None = None
    tokens_same: int | None = None
    words: int | None = None
    word_errors: int | None = None
    note: str = ""


def errors(found: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    """The figures of a ``Row`` for three tensors of one shape."""
    from pagealign.kernels.reference import twice_plain_error

    plain_error = (plain.double() - truth).abs()
    verdict = twice_plain_error(found, truth, plain)
    return {
        "max_error": verdict.max_error,
        "mean_error": verdict.mean_error,
        "plain_max_error": plain_error.max().item(),
        "plain_mean_error": plain_error.mean().item(),
        "within": verdict.ok,
        "compared": found.numel(),
    }
