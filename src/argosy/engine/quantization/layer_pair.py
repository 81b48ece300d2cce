"""A decoder layer in full precision and as it is quantized, through which the calibration tokens flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.rope import RopeRotation, gather_rope_rotation
from argosy.engine.execution.layers.modules import UNQUANTIZED_NAMES, DecoderLayer, Projection
from argosy.engine.execution.layers.moe import MixtureOfExperts
from argosy.engine.quantization.token_batches import DocumentBatches

OnInputs = Callable[[slice, Tensor, Tensor], None]
"""Function of a range of tokens, and their inputs [T, K] in full precision and in the quantized model."""


class _InputFoundError(Exception):
    """Ends a layer at the module whose input is wanted."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class LayerPair:
    """Both forms of a layer, and the hidden states [T, hidden] of all tokens before it, which `advance` replaces.

    Layers read and write their keys and values in the batches' KV cache, so each form runs from the start.
    """

    def __init__(
        self,
        full: DecoderLayer,
        quantized: DecoderLayer,
        batches: DocumentBatches,
        states: tuple[Tensor, Tensor],
        rope_table: Tensor,
    ) -> None:
        self.full = full
        self.quantized = quantized
        self._batches = batches
        self._states = states
        self._rope_table = rope_table

    @property
    def num_tokens(self) -> int:
        """Number of calibration tokens."""
        return self._batches.num_tokens

    def list_linears(self) -> list[str]:
        """Return the names of the linear layers that may be quantized, in the order in which they are computed.

        A mixture of experts stands for the linear layers of its experts.
        """
        found: list[str] = []

        def record(name: str, compute: Callable[..., Tensor], *inputs: object) -> Tensor:
            found.append(name)
            return compute(*inputs)

        with ExitStack() as stack:
            for name, module in self.full.named_modules():
                is_expert = ".experts." in f".{name}."
                if isinstance(module, Projection | MixtureOfExperts) and not is_expert:
                    stack.enter_context(_forward(module, partial(record, name, module.forward)))
            tokens, batch = next(iter(self._batches))
            self._run(self.full, self._states[0], tokens, batch, self._rotate(batch))
        return [name for name in found if name.rpartition(".")[2] not in UNQUANTIZED_NAMES]

    def collect_inputs(self, name: str, on_inputs: OnInputs) -> None:
        """Compute the inputs of a module for all tokens, batch by batch."""
        for tokens, batch in self._batches:
            rope = self._rotate(batch)
            inputs = [
                self._find_input(layer, name, state, tokens, batch, rope)
                for layer, state in zip((self.full, self.quantized), self._states, strict=True)
            ]
            on_inputs(tokens, *inputs)

    def advance(self) -> None:
        """Replace the hidden states by those after the layer."""
        for tokens, batch in self._batches:
            rope = self._rotate(batch)
            for layer, state in zip((self.full, self.quantized), self._states, strict=True):
                x, delta = self._run(layer, state, tokens, batch, rope)
                state[tokens] = x.add_(delta)

    def _rotate(self, batch: Batch) -> RopeRotation:
        return gather_rope_rotation(self._rope_table, batch.positions)

    def _find_input(
        self,
        layer: DecoderLayer,
        name: str,
        state: Tensor,
        tokens: slice,
        batch: Batch,
        rope: RopeRotation,
    ) -> Tensor:
        def stop(x: Tensor, *_others: object) -> Tensor:
            raise _InputFoundError(x)

        try:
            with _forward(layer.get_submodule(name), stop):
                self._run(layer, state, tokens, batch, rope)
        except _InputFoundError as found:
            return found.x
        raise RuntimeError(f"{name} was not computed")

    def _run(
        self, layer: DecoderLayer, state: Tensor, tokens: slice, batch: Batch, rope: RopeRotation
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the layer's output, which is not added to it yet."""
        x = state[tokens].clone()
        return x, layer.forward(x, None, rope, batch, self._batches.attention)


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the computation of a module within a context."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
