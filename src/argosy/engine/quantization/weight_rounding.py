"""Rounding of a weight to integers in groups along K: to the nearest (RTN), with AWQ's scales, or with GPTQ.

GPTQ is Frantar et al. 2022, and AWQ is Lin et al. 2023. Both get the inputs that the layer will have when it is served:
those of the quantized layers before it, rounded to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedWeight,
    GroupFormat,
    choose_group_size,
    create_grouped_weight,
)
from argosy.engine.execution.checkpoint_formats.quantization import quantize_rows
from argosy.model_store import RecipeName

DAMPING = 0.01
"""Share of the mean of the Hessian's diagonal that is added to the diagonal."""
FEEDBACK_COLUMNS = 128
"""Columns after which the errors reach the rest of the row, a multiple of all group sizes."""
SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(17))
"""Factors of a scale that are tried. A smaller scale clips the largest weight, and rounds the others more finely."""
AWQ_EXPONENTS = tuple(step / 20 for step in range(20))
"""Exponents of the inputs' mean magnitudes that are tried. 0 leaves the weight as it is."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Format of the weights. Activations have 8 bits, as for all quantized weights."""

    name: RecipeName
    bits: int
    group_size: int | None
    """Elements along K that share a scale. None is a whole row, as vLLM requires it for 8 bits."""

    @classmethod
    def named(cls, name: RecipeName) -> Recipe:
        """Return the recipe of a name."""
        bits, group_size = {"w8a8": (8, None), "w4a8-g32": (4, 32), "w4a8-g128": (4, 128)}[name]
        return cls(name, bits, group_size)

    @property
    def max_code(self) -> int:
        """Largest integer. The smallest one is -127 for 8 bits, and -8 for 4 bits."""
        return 127 if self.bits == 8 else 7

    def fits(self, cols: int) -> bool:
        """Return whether rows of `cols` weights divide into groups and words."""
        return cols % (self.group_size or 4) == 0

    def columns_per_scale(self, cols: int) -> int:
        """Return the number of columns that share a scale in rows of `cols`."""
        return self.group_size or cols

    def round_scales(self, scales: Tensor) -> Tensor:
        """Round scales to the dtype in which they are stored, which is bfloat16 for groups."""
        return scales if self.group_size is None else scales.bfloat16().float()

    def round_codes(self, scaled: Tensor) -> Tensor:
        """Round weights, divided by their scales, to integers, in place."""
        low = -127 if self.bits == 8 else -8
        return scaled.round_().clamp_(low, self.max_code)


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """Weight [N, K] as integers times scales."""

    codes: Tensor
    """[N, K] int8."""
    scales: Tensor
    """[N, groups] float32."""
    bits: int
    """4 or 8."""

    def to_grouped(self) -> GroupedWeight:
        """Return the weight in the form in which the loader reads it from a compressed-tensors checkpoint."""
        cols = self.codes.shape[1]
        stored_size = cols // self.scales.shape[1]
        group_size = choose_group_size(stored_size, cols)
        if group_size is None:
            raise ValueError(f"groups of {stored_size} columns are not supported")
        group_format, values = GroupFormat(8, group_size, has_offsets=False), self.codes
        if self.bits == 4:
            group_format = replace(group_format, bits=4, table=tuple(range(-8, 8)))
            values = (self.codes + 8).view(torch.uint8)
        return create_grouped_weight(group_format, values, self.scales, None, stored_size)


class InputStatistics:
    """Sums over the inputs of a layer with K columns, from which GPTQ computes the layer's error.

    A reference input is that of the model in full precision, and an actual input is that of the quantized model.
    """

    def __init__(self, cols: int) -> None:
        self.count = 0
        """Number of inputs."""
        self.hessian = torch.zeros(cols, cols)
        """Sum of the outer products of actual inputs, rounded to 8 bits."""
        self.drift = torch.zeros(cols, cols)
        """Sum of the outer products of (reference - actual) and actual inputs."""

    def add(self, reference: Tensor, actual: Tensor) -> None:
        """Add inputs [T, K]."""
        rounded = round_inputs(actual)
        self.hessian.addmm_(rounded.T, rounded)
        self.drift.addmm_((reference.float() - rounded).T, rounded)
        self.count += len(rounded)


def round_inputs(x: Tensor) -> Tensor:
    """Return inputs [T, K] as the kernels see them, rounded to 8 bits in chunks, in float32."""
    integers, scales = quantize_rows(x)
    return integers.mul_(scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]


def round_to_nearest(weight: Tensor, recipe: Recipe) -> RoundedWeight:
    """Round a weight [N, K], with the scales of the smallest squared error."""
    groups = weight.float().unflatten(1, (-1, recipe.columns_per_scale(weight.shape[1])))
    scales = _choose_scales(groups, torch.ones(()), recipe)
    codes = recipe.round_codes(groups / scales.unsqueeze(-1))
    return RoundedWeight(codes.flatten(1).to(torch.int8), scales, recipe.bits)


def round_with_feedback(weight: Tensor, inputs: InputStatistics, recipe: Recipe) -> RoundedWeight:
    """Round a weight [N, K] by GPTQ, after it is fitted to the actual inputs.

    The fit is the least-squares solution of the layer's output for reference inputs, with damping towards the weight.
    Then each column's rounding error is compensated by the columns after it.
    """
    cols = weight.shape[1]
    diagonal = inputs.hessian.diagonal()
    damping = (DAMPING * diagonal.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    damped = inputs.hessian + torch.diag(damping.expand(cols))
    factor = _factorize(damped)
    weight = weight.float()
    fitted = weight + torch.cholesky_solve((weight @ inputs.drift).T, factor).T
    inverse = _factorize(torch.cholesky_inverse(factor), upper=True)
    importance = damped.diagonal()
    size = recipe.columns_per_scale(cols)
    codes = torch.empty_like(fitted)
    all_scales = []
    if recipe.group_size is None:
        all_scales = [_choose_scales(fitted, importance, recipe)]
    for start in range(0, cols, FEEDBACK_COLUMNS):
        end = min(start + FEEDBACK_COLUMNS, cols)
        errors = torch.zeros(len(fitted), end - start)
        for col in range(start, end):
            if recipe.group_size is not None and col % size == 0:
                group = slice(col, col + size)
                all_scales.append(_choose_scales(fitted[:, group], importance[group], recipe))
            column, scale = fitted[:, col], all_scales[-1]
            codes[:, col] = recipe.round_codes(column / scale)
            errors[:, col - start] = (column - codes[:, col] * scale) / inverse[col, col]
            fitted[:, col:end] -= errors[:, col - start, None] * inverse[col, col:end]
        fitted[:, end:] -= errors @ inverse[start:end, end:]
    return RoundedWeight(codes.to(torch.int8), torch.stack(all_scales, 1), recipe.bits)


def find_input_scales(
    weight: Tensor, reference: Tensor, actual: Tensor, recipe: Recipe
) -> Tensor | None:
    """Return the scales [K] by which AWQ divides the inputs and multiplies the columns of a weight [N, K].

    None if no scales make the error of the layer's output smaller.

    Args:
        weight: The weight.
        reference: Inputs [T, K] of the model in full precision.
        actual: Inputs [T, K] of the quantized model.
        recipe: The recipe.
    """
    expected = reference.float() @ weight.float().T
    magnitudes = actual.float().abs().mean(0).clamp_(min=1e-6)
    best, best_error = None, torch.inf
    for exponent in AWQ_EXPONENTS:
        scales = magnitudes**exponent
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weight.float() * scales, recipe).to_grouped().dequantize()
        output = round_inputs(actual.float() / scales) @ rounded.T
        error = float((output - expected).square_().mean())
        if error < best_error:
            best, best_error = (scales if exponent else None), error
    return best


def _choose_scales(groups: Tensor, importance: Tensor, recipe: Recipe) -> Tensor:
    """Return the scale of each group [..., columns], with the smallest squared error, weighted by column."""
    peaks = groups.abs().amax(-1).clamp_(min=torch.finfo(torch.float32).tiny * 2**30)
    best_scales = best_errors = torch.empty(0)
    for factor in SHRINK_FACTORS:
        scales = recipe.round_scales(
            peaks * (factor / (recipe.max_code + 0.5 * (recipe.bits == 4)))
        )
        codes = recipe.round_codes(groups / scales.unsqueeze(-1))
        errors = codes.mul_(scales.unsqueeze(-1)).sub_(groups).square_().mul_(importance).sum(-1)
        if factor == SHRINK_FACTORS[0]:
            best_scales, best_errors = scales, errors
            continue
        is_better = errors < best_errors
        best_scales = torch.where(is_better, scales, best_scales)
        best_errors = torch.where(is_better, errors, best_errors)
    return best_scales


def _factorize(matrix: Tensor, *, upper: bool = False) -> Tensor:
    """Return the Cholesky factor of a matrix that is positive definite up to rounding."""
    for exponent in range(5):
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper)
        if not failed:
            return factor
        matrix = matrix + torch.diag(
            (matrix.diagonal().mean() * 10.0 ** (exponent - 4)).expand(len(matrix))
        )
    raise ValueError("the calibration inputs have no usable covariance; use other calibration text")
