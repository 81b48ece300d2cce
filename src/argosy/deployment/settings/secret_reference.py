"""References to secrets, in place of the secrets themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

VariableName = Annotated[
    str, Meta(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)", examples=["MY_VARIABLE"])
]


class SecretReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a secret is found when it is needed. Declarations and settings themselves contain none.

    For pools with `launcher: kubernetes` it is a key of the Secret that `kubernetes.secret_name` names.
    """

    env: VariableName | None = None
    """Environment variable of the controller."""
    file: Annotated[str, Meta(pattern="^/", examples=["/run/secrets/key"])] | None = None
    """Path of a file on the controller's machine."""

    @property
    def key(self) -> str:
        """Key of the secret in a Secret of Kubernetes: the variable's name, or that of the file."""
        return self.env or (self.file or "").rpartition("/")[2]

    def read(self, environ: Mapping[str, str] | None = None) -> str:
        """Return the secret.

        Args:
            environ: Environment variables. None means those of this process.

        Raises:
            ValueError: It does not exist. The message says what to change.
        """
        if self.env is not None:
            value = (os.environ if environ is None else environ).get(self.env)
            if not value:
                raise ValueError(f"the environment variable {self.env} is not set. Set it.")
            return value
        try:
            return Path(self.file or "").read_text(encoding="utf-8").rstrip("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(
                f"the file {self.file} cannot be read ({reason}). Create it."
            ) from error
