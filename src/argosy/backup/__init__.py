"""Backups of an installation: one verified set of store, series, and versions of models, in a folder or object store.

The function `create_backup` writes a set into a `BackupTarget` while gateways run. The function `check_backup` brings
it into a scratch folder, and checks every byte, the audit chain and the ledger. The function `restore_backup` does the
same, and then writes it into an empty installation. The function `answer_prompt` starts a gateway and a replica on a
restored store.

The `BackupStatus` in the store says when the last backup and the last drill of a restore were, for schedule and alerts.
"""

from argosy.backup.backup_manifest import (
    BackupError,
    BackupManifest,
    BackupPart,
    Cipher,
    read_cipher,
)
from argosy.backup.backup_status import (
    BackupCommand,
    BackupStatus,
    DrillResult,
    change_status,
    read_status,
)
from argosy.backup.backup_target import BackupTarget
from argosy.backup.check import CheckedBackup, check_backup
from argosy.backup.create import create_backup, delete_old_backups
from argosy.backup.pinned_prompt import answer_prompt
from argosy.backup.restore import RestoredBackup, restore_backup
