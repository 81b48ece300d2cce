"""OpenVINO GenAI: its ContinuousBatchingPipeline in process, with W4's arrival times too."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.worker import KV_GIB, MAX_SEQS, Request, Settings, Stamps, main

STEP_TOKENS = 1024


def convert(settings: Settings) -> Path:
    """Return the model as OpenVINO IR, which optimum-intel makes unless it exists."""
    path = settings.converted("openvino")
    if (path / "openvino_model.bin").exists():
        return path
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    bits = {"bf16": None, "int8": 8, "int4": 4}[settings.weights]
    quantized = None if bits is None else OVWeightQuantizationConfig(bits=bits)
    model = OVModelForCausalLM.from_pretrained(
        settings.model,
        export=True,
        compile=False,
        load_in_8bit=False,
        quantization_config=quantized,
    )
    model.save_pretrained(path)
    return path


class OpenVino:
    """Pipeline with bfloat16 arithmetic and, by its default, an 8-bit KV cache."""

    def __init__(self, settings: Settings) -> None:
        path = convert(settings)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = MAX_SEQS
        scheduler.enable_prefix_caching = settings.prefix_cache
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path,
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": settings.threads, "INFERENCE_PRECISION_HINT": "bf16"},
        )
        self._serial = 0
        self.version = f"{openvino_genai.__version__}, bf16 arithmetic, 8-bit KV cache, in process"

    def run(self, requests: list[Request]) -> Stamps:
        """Add each request at its arrival time, and step while any is unfinished."""
        pipeline = self._pipeline
        begin = time.perf_counter()
        stamps: Stamps = [[] for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda index: requests[index].at_s)
        running = {}
        while waiting or pipeline.has_non_finished_requests():
            now = time.perf_counter() - begin
            while waiting and requests[waiting[0]].at_s <= now:
                index = waiting.pop(0)
                running[index] = self._add(requests[index])
            if not pipeline.has_non_finished_requests():
                time.sleep(max(0.0, requests[waiting[0]].at_s - now))
                continue
            pipeline.step()
            now = time.perf_counter() - begin
            for index, handle in list(running.items()):
                while handle.can_read():
                    for answer in handle.read().values():
                        stamps[index] += [now] * len(answer.generated_ids)
                if len(stamps[index]) >= requests[index].output:
                    del running[index]
        return stamps

    def _add(self, request: Request) -> openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.output
        config.ignore_eos = True
        config.do_sample = False
        self._serial += 1
        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(self._serial, ids, config)


if __name__ == "__main__":
    main(OpenVino)
