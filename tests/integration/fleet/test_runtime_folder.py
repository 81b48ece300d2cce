"""Folder of `argosy serve`: removed at its end, or by the next process if it was killed."""

from __future__ import annotations

import os
import shutil

import pytest

from argosy.fleet import runtime_folder


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_folder_of_other_user_is_kept() -> None:
    with runtime_folder() as own_folder:
        other_folder = own_folder.with_name(own_folder.name + "-other_folder")
        other_folder.mkdir()
        os.mkfifo(other_folder / "lock")  # opening it would block for ever
        os.chown(other_folder, 65534, 65534)
        try:
            with runtime_folder():
                assert other_folder.is_dir()
        finally:
            shutil.rmtree(other_folder)


def test_stale_runtime_folders_are_removed() -> None:
    with runtime_folder() as kept:
        assert kept.stat().st_mode & 0o777 == 0o700
        stale = kept.with_name(kept.name + "-stale")
        stale.mkdir()
        (stale / "lock").touch()
        with runtime_folder() as other:
            assert kept.is_dir()
        assert not other.exists()
        assert not stale.exists()
    assert not kept.exists()
