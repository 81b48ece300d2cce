"""Output stage of models that compute vectors, which reduces the hidden states of a sequence to its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.architectures.checkpoint_tensors import EMBEDDING, HEAD, find_parts
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.architectures.pooling import PoolingLayout
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.checkpoint_formats.tensor_sources import open_tensor_source
from argosy.engine.execution.config.sentence_transformers import (
    DenseActivation,
    DenseLayout,
    PoolingMode,
)
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.encoders.encoder import Encoder
from argosy.engine.execution.executor.output_stage import (
    CompletedStep,
    LaunchedStep,
    StepHandle,
    find_corrupt_blocks,
)
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.torch.rowwise_ops import gelu, silu
from argosy.engine.pooling import PoolingParams
from argosy.engine.scheduling import (
    AdmittedSequence,
    SequenceFailure,
    StepDurations,
    StepPlan,
    StepResult,
)

NON_FINITE_VECTOR = SequenceFailure("the model produced values that are not finite")


class PoolingStage:
    """Pooler of one executor, with the hidden states [L, hidden] in float32 of its rows' earlier chunks.

    A step computes its sequences without padding, and waits for its results. The scheduler plans the shortest sequences
    first and limits a step's tokens, so that a step is a micro-batch of similar lengths.
    """

    def __init__(self, pooler: Pooler, device: Device) -> None:
        self._pooler = pooler
        self._device = device
        self._default_params = PoolingParams(reads_all_tokens=pooler.reads_all_tokens)
        self._params: dict[int, PoolingParams] = {}
        """Row -> parameters of its sequence."""
        self._states: dict[int, list[Tensor]] = {}
        """Row -> hidden states of its sequence's earlier chunks, if all of them are read."""

    def clear(self) -> None:
        self._params.clear()
        self._states.clear()

    def keep_rows(self, rows: set[int]) -> None:
        self._states = {row: states for row, states in self._states.items() if row in rows}

    def admit(self, admission: AdmittedSequence) -> None:
        self._params[admission.row] = admission.pooling or self._default_params
        self._states[admission.row] = []

    def find_forced_tokens(self, row: int) -> list[int]:  # noqa: ARG002 - of the interface
        return []

    def begin(self, plan: StepPlan) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        return self._read_tokens(plan), self._token_types(plan)

    def finish(self, step: LaunchedStep) -> StepHandle:
        """Pool the sequences that are complete."""
        pooled, failed = self._pool(step.plan, step.outputs)
        done = self._device.record_event()
        done.synchronize()
        return CompletedStep(
            StepResult(
                [-1] * len(step.plan.rows),
                failures=failed,
                corrupt_blocks=find_corrupt_blocks(step.restores),
                durations=StepDurations(
                    step.launch_s,
                    step.computed.seconds_since(step.ready),
                    done.seconds_since(step.computed),
                ),
                pooled=pooled,
            )
        )

    def _read_tokens(self, plan: StepPlan) -> NDArray[np.int64] | None:
        """Return the flat tokens whose hidden states are read beside the last ones of the sequences."""
        parts, flat = [], 0
        for row, count in zip(plan.rows, plan.counts, strict=True):
            if self._params[row].reads_all_tokens:
                parts.append(np.arange(flat, flat + count))
            flat += count
        return np.concatenate(parts) if parts else None

    def _token_types(self, plan: StepPlan) -> Tensor | None:
        """Return the number of the text of a pair that each flat token belongs to, or None if there are no pairs."""
        starts = [self._params[row].second_text_start for row in plan.rows]
        if all(start is None for start in starts):
            return None
        types = [
            np.arange(first, first + count) >= (first + count if start is None else start)
            for start, first, count in zip(starts, plan.starts, plan.counts, strict=True)
        ]
        return self._device.to_device(torch.from_numpy(np.concatenate(types).astype(np.int64)))

    def _pool(
        self, plan: StepPlan, states: Tensor
    ) -> tuple[dict[int, bytes], dict[int, SequenceFailure]]:
        """Pool the sequences whose last token is in this step, and keep the hidden states of the others.

        Returns:
            Result of each chunk that completes its sequence, as bytes of float32, and the failures.
        """
        complete: list[int] = []
        sequences: list[Tensor] = []
        position = 0
        for chunk, (row, count, is_last) in enumerate(
            zip(plan.rows, plan.counts, plan.sample_counts, strict=True)
        ):
            num_read = count if self._params[row].reads_all_tokens else int(is_last)
            part = states[position : position + num_read]
            position += num_read
            if is_last:
                parts = [*self._states.pop(row), part]
                complete.append(chunk)
                sequences.append(parts[0] if len(parts) == 1 else torch.cat(parts))
            elif num_read:
                self._states[row].append(part)
        params = [self._params[plan.rows[chunk]] for chunk in complete]
        results = self._pooler.pool(sequences, params) if complete else []
        pooled, failed = {}, {}
        for chunk, result in zip(complete, results, strict=True):
            values = result.cpu().contiguous().numpy()
            if np.isfinite(values).all():
                pooled[chunk] = values.tobytes()
            else:
                failed[chunk] = NON_FINITE_VECTOR
        return pooled, failed


_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": gelu,
    "silu": silu,
    "sigmoid": torch.sigmoid,
}


class Pooler:
    """Pooler of one model. A result depends only on the hidden states of its own sequence, bit for bit."""

    def __init__(
        self,
        modes: tuple[PoolingMode, ...],
        stages: Sequence[Callable[[Tensor], Tensor]],
        *,
        reads_all_tokens: bool,
    ) -> None:
        """Create the pooler of reductions, whose vectors [N, size] the stages map to the results, one by one.

        `reads_all_tokens` says whether a reduction needs other tokens than the last one.
        """
        self._modes = modes
        self._stages = stages
        self.reads_all_tokens = reads_all_tokens

    def pool(
        self, hidden_states: Sequence[Tensor], params: Sequence[PoolingParams]
    ) -> list[Tensor]:
        """Reduce sequences of hidden states [T, hidden] in float32, which start at their sequence's first token.

        Sequences of which only the last token is read may have only that one.

        Returns:
            A vector in float32 of each sequence, or the states [T, hidden] of those at token level.
        """
        results = list(hidden_states)
        pooled = [index for index, each in enumerate(params) if not each.is_token_level]
        if pooled:
            rows = torch.stack(
                [self._reduce(hidden_states[index], params[index].first_token) for index in pooled]
            )
            for stage in self._stages:
                rows = stage(rows)
            for index, row in zip(pooled, rows.float(), strict=True):
                results[index] = row
        return results

    def _reduce(self, states: Tensor, first_token: int) -> Tensor:
        """Reduce hidden states [T, hidden] to the concatenated vectors. At least the last token is left."""
        first_token = min(first_token, len(states) - 1)
        kept = states[first_token:]
        vectors = []
        for mode in self._modes:
            if mode == "cls":
                vectors.append(kept[0])
            elif mode == "lasttoken":
                vectors.append(kept[-1])
            elif mode == "max":
                vectors.append(kept.amax(0))
            elif mode == "weightedmean":
                weights = torch.arange(first_token + 1, len(states) + 1, device=states.device)
                weighted = kept * weights[:, None].float()
                vectors.append(weighted.sum(0) / float(weights.sum()))
            else:
                divisor = len(kept) if mode == "mean" else len(kept) ** 0.5
                vectors.append(kept.sum(0) / divisor)
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def load_pooler(
    layout: PoolingLayout,
    model: Encoder | Decoder,
    checkpoint: CheckpointReader,
    device: Device,
    dtype: torch.dtype,
) -> Pooler:
    """Load the pooler of a model whose transformer is loaded.

    Raises:
        ValueError: A tensor is missing or of the wrong shape. The message names the file.
    """
    architecture = model.architecture
    stages: list[Callable[[Tensor], Tensor]] = []
    modes = layout.modes
    if layout.head == "logit_score":
        stages.append(_load_logit_score(layout, architecture, checkpoint, device))
    elif isinstance(model, Encoder) and model.head is not None:
        head = model.head
        stages.append(lambda x: head.forward(x.to(dtype)))
    elif layout.head == "classification":
        shape = (layout.num_labels, architecture.hidden_size)
        weight = checkpoint.read_tensor((StoredPart("score.weight"),), shape)
        stages.append(_in_dtype(device.create_linear(_move(weight, device, dtype), None), dtype))
    width = len(modes) * architecture.hidden_size
    for dense in layout.dense:
        if dense.in_features != width:
            raise ValueError(
                f"{dense.folder / 'config.json'}: in_features is {dense.in_features}; "
                f"it must be {width}, the size of the vectors before it"
            )
        stages.append(_load_dense(dense, device, dtype))
        width = dense.out_features
    return Pooler(modes, stages, reads_all_tokens=layout.info.reads_all_tokens)


def _load_dense(
    dense: DenseLayout, device: Device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    source = open_tensor_source(dense.folder)
    names = ["linear.weight", *(["linear.bias"] if dense.has_bias else [])]
    shapes = {
        "linear.weight": (dense.out_features, dense.in_features),
        "linear.bias": (dense.out_features,),
    }
    for name in names:
        if name not in source.files or source.shape(name) != shapes[name]:
            raise ValueError(
                f"{dense.folder}: {name} is missing or not of shape {shapes[name]}; fetch the model again"
            )
    weight, *bias = (_move(source.read(name), device, dtype) for name in names)
    linear = _in_dtype(device.create_linear(weight, bias[0] if bias else None), dtype)
    activate = _ACTIVATIONS[dense.activation]
    return lambda x: activate(linear(x).float())


def _load_logit_score(
    layout: PoolingLayout,
    architecture: EncoderArchitecture | ModelArchitecture,
    checkpoint: CheckpointReader,
    device: Device,
) -> Callable[[Tensor], Tensor]:
    """Load the head's rows of the score's tokens. The score is the first logit, minus the second if there are two."""
    if isinstance(architecture, EncoderArchitecture):
        raise ValueError(  # noqa: TRY004 - the checkpoint is invalid
            f"{checkpoint.path}: an encoder has no logits; use a language model"
        )
    parts = find_parts(architecture, HEAD, checkpoint.files)
    if parts is None and architecture.tied_embeddings:
        parts = find_parts(architecture, EMBEDDING, checkpoint.files)
    if parts is None:
        raise ValueError(f"{checkpoint.path} has no output matrix; fetch the model again")
    if max(layout.score_token_ids) >= architecture.vocab_size:
        raise ValueError(
            f"{checkpoint.path}: LogitScore names token {max(layout.score_token_ids)}, but vocab_size of "
            f"config.json is {architecture.vocab_size}; fetch the model again"
        )
    head = checkpoint.read_parts(parts)
    rows = head[list(layout.score_token_ids)].to(device=device.torch_device, dtype=torch.float32)
    softcap = architecture.logit_softcap

    def score(x: Tensor) -> Tensor:
        logits = (x.float()[:, None] * rows).sum(-1)
        if softcap is not None:
            logits = logits.div(softcap).tanh().mul(softcap)
        return logits if logits.shape[-1] == 1 else logits[:, :1] - logits[:, 1:]

    return score


def _in_dtype(linear: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x.to(dtype).contiguous())


def _move(tensor: Tensor, device: Device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device.torch_device, dtype=dtype)
