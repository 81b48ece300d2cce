"""Engine core with scripted tokens, which depend only on the prefix, and scripted faults.

`EngineConfig.model` names a scratch directory that outlives the process. The core counts its loads and
its injected faults there. A prompt is `[command, k, times, ...salt]`. The command takes effect before
output token k, at most `times` times.

Never compared with `EngineCore`.
"""

import enum
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from argosy.engine import EngineConfig, EngineRequest
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.core_messages import (
    CoreReady,
    Delta,
    EngineFinishReason,
    SleepChanged,
    StepOutputs,
)
from argosy.process import private_memory_bytes
from argosy.telemetry import CoreStats

CORE = "tests.support.scripted_core:ScriptedCore"
VOCAB = 1000
ERRORS = {
    "RuntimeError": RuntimeError("scripted load"),
    "ValueError": ValueError("scripted load"),
    "OSError": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
}
"""Errors that a load can raise."""


class Command(enum.IntEnum):
    NONE = 0
    EXIT = 1
    KILL = 2
    RAISE = 3
    HANG = 4
    REFUSE = 5
    """`add` raises."""
    GATE = 6
    """Run empty steps until `open_gate` is called."""
    LEAK = 7
    """Keep 128 MiB, which no shedding releases. The bound is 64 MiB above the memory after the load."""


def prompt(
    command: Command = Command.NONE, at: int = 0, times: int = 1, salt: int = 0
) -> list[int]:
    return [command, at, times, salt]


def expected_tokens(tokens: list[int], count: int) -> list[int]:
    """Return the `count` tokens that follow the prefix `tokens`."""
    sequence = list(tokens)
    for _ in range(count):
        digest = 17
        for token in sequence:
            digest = (digest * 1000003 + token) % (2**61 - 1)
        sequence.append(digest % VOCAB)
    return sequence[len(tokens) :]


def open_gate(directory: Path, width: int = 10**6) -> None:
    """Allow each request with `Command.GATE` to generate `width` tokens after the gate."""
    (directory / "gate-").write_text(str(width))
    (directory / "gate-").rename(directory / "gate")


def plan_loads(directory: Path, *, failing: int, error: str = "RuntimeError") -> None:
    """Make the first `failing` loads raise `error`."""
    (directory / "failing").write_text(f"{failing} {error}")


def count_loads(directory: Path) -> int:
    """Return the number of started loads."""
    path = directory / "loads"
    return len(path.read_text()) if path.exists() else 0


@dataclass
class ScriptedRequest:
    request: EngineRequest
    output: list[int] = field(default_factory=list)
    has_delta: bool = False
    prompt_logprobs: int = 0


class ScriptedCore:
    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        progress: Callable[[str, float], None],
    ) -> None:
        self._directory = Path(config.model)
        with (self._directory / "loads").open("a") as file:
            file.write("x")
        progress("weights", 0.5)
        plan = self._directory / "failing"
        if plan.exists():
            failing, error = plan.read_text().split()
            if count_loads(self._directory) <= int(failing):
                raise ERRORS[error]
        progress("weights", 1.0)
        weights = self._directory / "weights"
        self._fingerprint = weights.read_text() if weights.exists() else ""
        self._jobs: dict[str, ScriptedRequest] = {}
        self._aborted: list[str] = []
        self._step = 0
        self._leaked: list[bytes] = []
        self._memory_bound_bytes = private_memory_bytes() + (64 << 20)

    @property
    def info(self) -> CoreReady:
        return CoreReady(
            max_model_len=4096,
            vocab_size=VOCAB,
            eos_token_ids=[],
            block_size=16,
            num_blocks=64,
            max_seqs=64,
            kv_capacity_tokens=4,
            load_s=0.0,
            backend=f"scripted {os.getpid()}",
            fingerprint=self._fingerprint,
            is_exact=not (self._directory / "inexact").exists(),
            memory_bound_bytes=self._memory_bound_bytes,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._aborted)

    def add(self, request: EngineRequest) -> None:
        if request.prompt[0] == Command.REFUSE:
            msg = "scripted refusal"
            raise RuntimeError(msg)
        self._jobs[request.id] = ScriptedRequest(request, list(request.resumed_tokens))

    def abort(self, request_ids: list[str]) -> None:
        self._aborted += [id_ for id_ in request_ids if self._jobs.pop(id_, None)]
        with (self._directory / "aborted").open("a") as file:
            file.write("x" * len(request_ids))

    def shed_memory(self, *, end_requests: bool) -> None:
        with (self._directory / "shed").open("a") as file:
            file.write(f"{end_requests:d}")

    def set_sleep_level(self, level: int) -> SleepChanged:
        with (self._directory / "slept").open("a") as file:
            file.write(f"{level}")
        assert not self._jobs
        return SleepChanged(level, 0.5)

    def step(self) -> StepOutputs:
        self._step += 1
        deltas = [Delta(id=id_, finish_reason="cancelled") for id_ in self._aborted]
        self._aborted.clear()
        deltas += [delta for job in list(self._jobs.values()) for delta in self._advance(job)]
        return StepOutputs(deltas, CoreStats(step=self._step, running=len(self._jobs)))

    def _advance(self, job: ScriptedRequest) -> Iterator[Delta]:
        request = job.request
        wanted = len(request.prompt) - 1 if request.params.prompt_logprobs is not None else 0
        if job.prompt_logprobs < wanted:
            job.prompt_logprobs += 1
            token = request.prompt[job.prompt_logprobs]
            yield self._delta(job, prompt_logprobs=[Logprob(token, -1.0, 1, [])])
            return
        if not self._inject_fault(request, len(job.output)):
            time.sleep(0.001)
            return
        tokens = expected_tokens(request.prompt + job.output, 1)
        job.output += tokens
        if len(job.output) < request.max_tokens:
            yield self._delta(job, tokens=tokens)
        else:
            del self._jobs[request.id]
            yield self._delta(job, tokens=tokens, finish="length")

    def _delta(
        self,
        job: ScriptedRequest,
        *,
        tokens: list[int] | None = None,
        prompt_logprobs: list[Logprob] | None = None,
        finish: EngineFinishReason | None = None,
    ) -> Delta:
        first = not job.has_delta
        job.has_delta = True
        return Delta(
            id=job.request.id,
            tokens=tokens or [],
            prompt_logprobs=prompt_logprobs or [],
            finish_reason=finish,
            queue_s=0.5 if first else None,
            cached_tokens=3 if first else None,
        )

    def _inject_fault(self, request: EngineRequest, index: int) -> bool:
        """Inject the scripted fault if it is due. Return whether the request gets its token in this step."""
        command, at, times = request.prompt[:3]
        if command == Command.GATE:
            gate = self._directory / "gate"
            return index < at + (int(gate.read_text()) if gate.exists() else 0)
        if command == Command.NONE or index != at:
            return True
        fault_file = self._directory / f"fault_file-{'-'.join(map(str, request.prompt))}"
        before = len(fault_file.read_text()) if fault_file.exists() else 0
        if before >= times:
            return True
        fault_file.write_text("x" * (before + 1))
        match Command(command):
            case Command.EXIT:
                os._exit(7)
            case Command.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Command.LEAK:
                self._leaked.append(b"x" * (128 << 20))
                return True
            case Command.HANG:
                threading.Event().wait()
            case _:
                msg = "scripted failure of a step"
                raise RuntimeError(msg)
        return False


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_if_alive(pid, signal.SIGCONT)


def signal_if_alive(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
