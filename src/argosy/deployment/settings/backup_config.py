"""Schedule of backups, and of drills that restore them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class BackupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When one of the gateways of a store backs it up, and shows that a backup can be restored."""

    target: Annotated[str, Meta(min_length=1, max_length=2000, examples=["s3://bucket/argosy"])]
    """Folder, or URL of an object store, that all gateways reach."""
    every_s: Annotated[float, Meta(ge=60, le=31 * 86_400)] = 86_400.0
    """Time between two backups. What happened since the newest one is lost with the store."""
    keep: Annotated[int, Meta(ge=1, le=10_000)] = 14
    """Number of backups to keep."""
    key_file: str | None = None
    """File with the key for the secrets of the store. Without it they are not in backups."""
    drill_every_s: Annotated[float, Meta(ge=3600, le=366 * 86_400)] | None = 7 * 86_400.0
    """Time between two drills, which restore the newest backup into a scratch folder. None runs none."""
    prompt: str | None = "Hello"
    """Prompt that a gateway and a replica answer on the restored store. None starts none."""
    answer: str | None = None
    """Expected answer, of at most 16 tokens. None accepts any."""
    model: str | None = None
    """Model that answers, as `argosy serve` takes it. None is the bundled one."""

    def build_command(self, command: Literal["create", "drill"]) -> list[str]:
        """Return the arguments of `argosy backup` for a backup or a drill."""
        options: dict[str, object] = {"key-file": self.key_file}
        if command == "create":
            options["keep"] = self.keep
        elif self.prompt is not None:
            options |= {"prompt": self.prompt, "answer": self.answer, "model": self.model}
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [command, *given, "--", self.target]
