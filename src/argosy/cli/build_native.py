"""`argosy build-native`: compiles the native code in advance, for container images without a compiler."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.failure import fail


def build_native(
    folder: Annotated[Path, typer.Argument(help="Folder of the libraries; it is created.")],
) -> None:
    """Compile the native code in advance, for machines without a C++ compiler.

    They find it if `ARGOSY_NATIVE_FOLDER` names the folder. Elsewhere the first start compiles it.
    """
    from argosy.gateway import prebuild_fast_path
    from argosy.native import NativeUnavailableError

    try:
        libraries = {"fast path": prebuild_fast_path(folder)}
        if find_spec("torch") is not None:
            from argosy.engine import prebuild_kernels, prebuild_token_index

            libraries["token index"] = prebuild_token_index(folder)
            kernels = prebuild_kernels(folder)
            libraries |= {f"kernels for {name}": path for name, path in kernels.items()}
    except NativeUnavailableError as error:
        fail(str(error))
    for name, path in libraries.items():
        typer.echo(f"{path}  {name}")
