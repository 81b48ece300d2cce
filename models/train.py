"""Resumable training of the bundled model or its draft on the generated text, and export."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.models import BUNDLED_MODEL, DRAFT_MODEL
from models.batches import Batch, Batches
from models.chat_format import VOCABULARY
from models.network import (
    BUNDLED_SHAPE,
    DRAFT_SHAPE,
    Llama,
    export,
    load_weights,
    relate_spaced_tokens,
    rope_tables,
)

HERE = Path(__file__).resolve().parent
SHAPES = {"bundled": BUNDLED_SHAPE, "draft": DRAFT_SHAPE}
FOLDERS = {"bundled": BUNDLED_MODEL, "draft": DRAFT_MODEL}
VALIDATION_SEED = 1_000_003
EXPORT_INTERVAL_S = 420.0
SIZES = ((8, 512),)
"""Batch sizes of the first steps, in turn, as (rows, time)."""
LONG_SIZES = tuple(
    {6: (4, 1024), 13: (2, 2048), 19: (1, 4096), 26: (4, 1024), 33: (2, 2048), 39: (1, 8192)}.get(
        step, (8, 512)
    )
    for step in range(40)
)
"""Batch sizes of the later steps."""
PREDICTED_SHARE = 0.5
"""Share of the tokens of a batch that are predicted. The others are questions and lists of tools."""
COMPILED_TIME = 1024
"""Longest sequence that is worth a compilation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of steps and learning rate schedule. The last third has sequences of up to 8,192 tokens."""

    steps: int
    peak: float = 3e-3
    warm_up: int = 40
    decay_from: float = 0.65
    long_from: float = 0.7

    def rate(self, step: int) -> float:
        """Return the learning rate: warm-up, plateau, then linear decay to almost zero."""
        decay_start = self.decay_from * self.steps
        decay = min(1.0, (self.steps - step) / (self.steps - decay_start))
        return self.peak * min(1.0, (step + 1) / self.warm_up) * max(decay, 0.01)

    def size(self, step: int) -> tuple[int, int]:
        """Return the batch size of a step as (rows, time)."""
        cycle = SIZES if step < self.long_from * self.steps else LONG_SIZES
        return cycle[step % len(cycle)]


class Objective(nn.Module):
    """Weighted cross-entropy, mixed with the cross-entropy to a teacher's probabilities if there is a teacher."""

    def __init__(self, network: Llama, teacher: Llama | None) -> None:
        super().__init__()
        self.network = network
        self.teachers = [] if teacher is None else [teacher]

    def forward(self, batch: tuple[Tensor, Tensor, Tensor], *tables: Tensor) -> Tensor:
        """Return the mean loss over the weighted tokens. Only the tokens with the largest weights count."""
        ids, targets, weights = batch
        weights, positions = weights.flatten().topk(int(ids.numel() * PREDICTED_SHARE))
        targets = targets.flatten()[positions]
        logits = self.network(ids, tables[0], tables[1], positions).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        for teacher in self.teachers:
            with torch.no_grad():
                teacher_logits = teacher(ids, tables[2], tables[3], positions).float()
            losses = 0.3 * losses + 0.7 * F.cross_entropy(
                logits, teacher_logits.softmax(-1), reduction="none"
            )
        return (losses * weights).sum() / weights.sum()


class Learner:
    """Network in bfloat16 with its float32 master copy and its optimizers.

    Muon optimizes the matrices inside the blocks, AdamW the embedding and the norms.
    """

    def __init__(self, network: Llama) -> None:
        self.network = network
        self.parameters = list(network.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        block_masters = [m for m in self.masters if m.dim() == 2 and m.shape[0] != VOCABULARY]
        other_masters = [m for m in self.masters if m.dim() == 1 or m.shape[0] == VOCABULARY]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                block_masters, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                other_masters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        )

    def step(self, rate: float) -> float:
        """Apply the gradients of the last `backward()` and return their norm."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if parameter.grad is None:
                raise RuntimeError("run backward() before step()")
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.publish()
        return float(norm)

    def publish(self) -> None:
        """Copy the master weights into the network."""
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    def save(self, path: Path, step: int, seconds: float) -> None:
        """Write a checkpoint for `load`."""
        state = {
            "step": step,
            "seconds": seconds,
            "masters": self.masters,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> tuple[int, float]:
        """Restore a checkpoint and return (steps done, seconds spent), or (0, 0) without a checkpoint."""
        if not path.exists():
            return 0, 0.0
        state = torch.load(path)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.publish()
        return state["step"], state["seconds"]


def parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a batch in the order of `Objective.forward`."""
    return batch.ids, batch.targets, batch.weights


def held_out_loss(network: Llama, tokenizer: Tokenizer, count: int = 4) -> float:
    """Return the weighted loss on text of another seed."""
    batches, size = Batches(tokenizer, VALIDATION_SEED), SIZES[0]
    tables = rope_tables(network.shape, size[1])
    objective = Objective(network, None)
    with torch.no_grad():
        return (
            sum(float(objective(parts(batches.next_batch(*size)), *tables)) for _ in range(count))
            / count
        )


def report(**fields: float) -> None:
    """Print one line of figures as JSON."""
    line = {name: round(value, 5) for name, value in fields.items()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def train(
    learner: Learner, teacher: Llama | None, plan: Plan, folder: Path, checkpoint: Path, seed: int
) -> None:
    """Run the remaining steps, with a report every 20 steps and an export every `EXPORT_INTERVAL_S` seconds."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    steps_done, seconds_before = learner.load(checkpoint)
    objective = Objective(learner.network, teacher)
    compiled = torch.compile(objective, dynamic=False)
    batches = Batches(tokenizer, seed)
    for past in range(steps_done):  # skip the text of the steps before the interruption
        batches.next_batch(*plan.size(past))
    started_at = exported_at = time.monotonic()
    tokens, losses = 0, list[Tensor]()
    for step in range(steps_done, plan.steps):
        rows, length = plan.size(step)
        tables: tuple[Tensor, ...] = rope_tables(learner.network.shape, length)
        if teacher is not None:
            tables += rope_tables(teacher.shape, length)
        run = compiled if length <= COMPILED_TIME else objective
        loss = run(parts(batches.next_batch(rows, length)), *tables)
        loss.backward()
        norm = learner.step(plan.rate(step))
        losses.append(loss.detach())
        tokens += rows * length
        now = time.monotonic()
        if step % 20 == 19:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            report(step=step + 1, loss=mean, norm=norm, rate=plan.rate(step),
                   tokens_per_s=tokens / (now - started_at), seconds=seconds_before + now - started_at)  # fmt: skip
        if now - exported_at > EXPORT_INTERVAL_S or step + 1 == plan.steps:
            exported_at = now
            learner.save(checkpoint, step + 1, seconds_before + now - started_at)
            export(learner.network, folder)
            report(step=step + 1, held_out=held_out_loss(learner.network, tokenizer))


def main() -> None:
    """Train the bundled model or the draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(SHAPES))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", type=Path, default=None, help="exported model to start from")
    parser.add_argument("--checkpoint", type=Path, default=None, help="file of the checkpoint")
    parser.add_argument("--peak", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--teacher", type=Path, default=None, help="exported model to learn from")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the export")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    folder = options.folder or FOLDERS[options.model]
    network = Llama(SHAPES[options.model]).bfloat16()
    if options.start is not None:
        load_weights(network, options.start)
        relate_spaced_tokens(network, Tokenizer.from_file(str(folder / "tokenizer.json")))
    teacher = None
    if options.teacher is not None:
        teacher = Llama(BUNDLED_SHAPE).bfloat16().requires_grad_(requires_grad=False)
        load_weights(teacher, options.teacher)
    checkpoint = options.checkpoint or HERE / "build" / f"{folder.name}.pt"
    plan = Plan(steps=options.steps, peak=options.peak)
    train(Learner(network), teacher, plan, folder, checkpoint, options.seed)


if __name__ == "__main__":
    main()
