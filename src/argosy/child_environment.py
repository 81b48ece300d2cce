"""Environment variables of child processes: what their kind needs, and no secret of the process that starts them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from argosy.settings import is_secret_name

_SYSTEM = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|LANG|LANGUAGE|LC_.*|TZ|TZDIR|TMPDIR|TMP|TEMP|XDG_.*|NO_COLOR|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_.*|GLIBC_TUNABLES|PYTHON.*|VIRTUAL_ENV|CONDA_.*|COVERAGE_.*|"
    r"ARGOSY_(?!STORE$|URL$|API_KEY$).*"
)
"""Variables that every process needs: to find programs, libraries, folders, the language and the time zone."""
_COMPUTE = re.compile(
    r"CUDA_.*|CUBLAS_.*|CUDNN_.*|NVIDIA_.*|NCCL_.*|NVTE_.*|ROCR_.*|ROCM_.*|HIP_.*|HSA_.*|AMD_.*|RCCL_.*|GPU_.*|"
    r"OMP_.*|GOMP_.*|KMP_.*|MKL_.*|OPENBLAS_.*|BLIS_.*|NUMEXPR_.*|ONEDNN_.*|DNNL_.*|TORCH.*|PYTORCH_.*|TRITON_.*|"
    r"VLLM_.*|SGLANG_.*|SGL_.*|FLASHINFER_.*|GGML_.*|LLAMA_.*|TRANSFORMERS_.*|TOKENIZERS_.*|SAFETENSORS_.*|HF_.*|"
    r"HUGGINGFACE_.*|CC|CXX|SSL_CERT_.*|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|RAY_.*|GLOO_.*|UCX_.*|NUMBA_.*|"
    r"(?i:(http|https|no|all)_proxy)"
)
"""Variables of engines: devices, threads, libraries, caches of models, and how to reach the hub."""
_MODEL_SOURCES = re.compile(
    r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|AWS_.*|GOOGLE_.*|GCS_.*|AZURE_.*|S3_.*|ARGOSY_MODELS.*"
)
"""Credentials of the places that models come from."""


def system_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that computes nothing of its own, such as one that renders templates."""
    return {name: value for name, value in environment.items() if _is_public(_SYSTEM, name)}


def replica_variables(
    environment: Mapping[str, str], *, has_credentials: bool = False
) -> dict[str, str]:
    """Return the variables for a replica. What else it needs is declared as `environment` of its pool.

    Args:
        environment: Environment of the process that starts it.
        has_credentials: Whether it gets the credentials of model sources too, because one command line starts it and
            names its model.
    """
    return {
        name: value
        for name, value in environment.items()
        if _is_public(_SYSTEM, name)
        or _is_public(_COMPUTE, name)
        or (has_credentials and _MODEL_SOURCES.fullmatch(name))
    }


def _is_public(names: re.Pattern[str], name: str) -> bool:
    return names.fullmatch(name) is not None and not is_secret_name(name)
