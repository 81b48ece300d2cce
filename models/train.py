"""Train the bundled model or its draft on the generated text, resumably, and export it."""

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
from models.network import BUNDLED_SHAPE, DRAFT_SHAPE, Llama, export, load_weights, rope_tables
from models.tokenizer import VOCABULARY

HERE = Path(__file__).resolve().parent
SHAPES = {"bundled": BUNDLED_SHAPE, "draft": DRAFT_SHAPE}
FOLDERS = {"bundled": BUNDLED_MODEL, "draft": DRAFT_MODEL}
VALIDATION_SEED = 1_000_003
EXPORT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn; the last part of the steps sees long sequences."""

    steps: int
    peak: float = 3e-3
    warm_up: int = 60
    decay_from: float = 0.6
    long_from: float = 0.9
    short: tuple[int, int] = (16, 256)
    long: tuple[int, int] = (4, 1024)

    def rate(self, step: int) -> float:
        """Return the learning rate: warm-up, plateau, then a straight line to (almost) zero."""
        begin = self.decay_from * self.steps
        decay = min(1.0, (self.steps - step) / (self.steps - begin))
        return self.peak * min(1.0, (step + 1) / self.warm_up) * max(decay, 0.01)

    def size(self, step: int) -> tuple[int, int]:
        """Return (rows, time) of the batch of a step."""
        return self.short if step < self.long_from * self.steps else self.long


class Objective(nn.Module):
    """Weighted cross-entropy, mixed with the divergence from a teacher where there is one."""

    def __init__(self, network: Llama, teacher: Llama | None) -> None:
        super().__init__()
        self.network = network
        self.teachers = [] if teacher is None else [teacher]

    def forward(self, batch: tuple[Tensor, Tensor, Tensor], *tables: Tensor) -> Tensor:
        """Return the mean loss over the weighted tokens."""
        ids, targets, weights = batch
        logits = self.network(ids, tables[0], tables[1]).float().flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), reduction="none")
        for teacher in self.teachers:
            with torch.no_grad():
                wanted = teacher(ids, tables[2], tables[3]).float().flatten(0, 1).softmax(-1)
            each = 0.3 * each + 0.7 * F.cross_entropy(logits, wanted, reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()


class Learner:
    """Owns the network in bfloat16, its float32 master copy and the optimizers.

    Muon moves the matrices inside the blocks, AdamW the embedding and the norms.
    """

    def __init__(self, network: Llama) -> None:
        self.network = network
        self.parameters = list(network.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        inner = [m for m in self.masters if m.dim() == 2 and m.shape[0] != VOCABULARY]
        outer = [m for m in self.masters if m.dim() == 1 or m.shape[0] == VOCABULARY]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(inner, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

    def step(self, rate: float) -> float:
        """Apply the gradients that backward() left; return their norm."""
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
        """Write a checkpoint from which `load` continues."""
        state = {
            "step": step,
            "seconds": seconds,
            "masters": self.masters,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".part")
        torch.save(state, fresh)
        fresh.replace(path)

    def load(self, path: Path) -> tuple[int, float]:
        """Return (steps done, seconds spent); (0, 0) when there is no checkpoint."""
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


def held_out_loss(network: Llama, tokenizer: Tokenizer, count: int = 16) -> float:
    """Return the weighted loss on text of another seed."""
    batches, plan = Batches(tokenizer, VALIDATION_SEED), Plan(steps=1)
    tables = rope_tables(network.shape, plan.short[1])
    objective = Objective(network, None)
    with torch.no_grad():
        return (
            sum(float(objective(parts(batches.take(*plan.short)), *tables)) for _ in range(count))
            / count
        )


def report(**fields: float) -> None:
    """Print one line of figures as JSON."""
    line = {name: round(value, 5) for name, value in fields.items()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def train(learner: Learner, teacher: Llama | None, plan: Plan, folder: Path, seed: int) -> None:
    """Run the steps that are left, with a report each 20 and an export each `EXPORT_S` seconds."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    checkpoint = HERE / "build" / f"{folder.name}.pt"
    done, before = learner.load(checkpoint)
    objective = torch.compile(Objective(learner.network, teacher), dynamic=False)
    batches = Batches(tokenizer, seed)
    for past in range(done):  # an interrupted run goes on with the text that it would have seen
        batches.take(*plan.size(past))
    began = exported = time.monotonic()
    tokens, losses = 0, list[Tensor]()
    for step in range(done, plan.steps):
        rows, length = plan.size(step)
        tables: tuple[Tensor, ...] = rope_tables(learner.network.shape, length)
        if teacher is not None:
            tables += rope_tables(teacher.shape, length)
        loss = objective(parts(batches.take(rows, length)), *tables)
        loss.backward()
        norm = learner.step(plan.rate(step))
        losses.append(loss.detach())
        tokens += rows * length
        now = time.monotonic()
        if step % 20 == 19:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            report(step=step + 1, loss=mean, norm=norm, rate=plan.rate(step),
                   tokens_per_s=tokens / (now - began), seconds=before + now - began)  # fmt: skip
        if now - exported > EXPORT_S or step + 1 == plan.steps:
            exported = now
            learner.save(checkpoint, step + 1, before + now - began)
            export(learner.network, folder)
            report(step=step + 1, held_out=held_out_loss(learner.network, tokenizer))


def main() -> None:
    """Train one of the two models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(SHAPES))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--teacher", type=Path, default=None, help="exported folder to learn from")
    parser.add_argument("--folder", type=Path, default=None, help="where to export to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    network = Llama(SHAPES[options.model]).bfloat16()
    teacher = None
    if options.teacher is not None:
        teacher = Llama(BUNDLED_SHAPE).bfloat16().requires_grad_(requires_grad=False)
        load_weights(teacher, options.teacher)
    folder = options.folder or FOLDERS[options.model]
    train(Learner(network), teacher, Plan(steps=options.steps), folder, options.seed)


if __name__ == "__main__":
    main()
