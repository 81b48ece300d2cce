"""Models by their content: which files are a model, their digest, their download, and where they are on this machine.

A `Manifest` lists a model's files with their SHA-256. Its digest identifies the model wherever it came from.

`pull_model` brings a model from a directory, the hub or a URL into the `ModelStore` of the machine. A stored version
has a name and a stage. Replicas check what they load with `verify_model`. `download_model` uses the cache of
huggingface_hub instead of the store.
"""

from __future__ import annotations

from argosy.model_store.file_hashes import FileHashes
from argosy.model_store.garbage import Garbage, collect_garbage
from argosy.model_store.hub import HubName, download_model, hub_commit
from argosy.model_store.manifest import (
    DIGEST_PREFIX,
    MANIFEST_FILE,
    Manifest,
    ModelDigest,
    ModelFile,
    ModelStoreError,
    parse_manifest,
)
from argosy.model_store.model_files import (
    MAX_LISTED_FILES,
    MODEL_PATTERNS,
    MODULE_PATTERNS,
    QUALITY_FILE,
    check_no_pointers,
    gguf_part_names,
    group_gguf_models,
    is_gguf_only,
    layout_patterns,
    list_model_files,
)
from argosy.model_store.model_source import SourceFile, find_file_system, is_url
from argosy.model_store.model_store import (
    REFERENCE_PREFIX,
    STAGES,
    ModelStore,
    ModelVersion,
    Stage,
    hold_model,
    open_model_store,
    stored_digest,
)
from argosy.model_store.pull import PullObserver, pull_model
from argosy.model_store.quality_report import (
    QualityLimits,
    QualityReport,
    RecipeName,
    RoundingMethod,
    default_limits,
    find_report_problem,
    read_quality_report,
)
from argosy.model_store.verification import ModelMismatchError, compute_manifest, verify_model
