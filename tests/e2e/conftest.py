"""Shared server of the tests that do not change its state."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.serve_process import ServeProcess, run_serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Server of a file, whose working directory was deleted, and whose temporary folder has a long path.

    A deployment may delete the folder of the previous version. Relative library paths of torch then fail. The paths of
    sockets in the temporary folder would be too long.
    """
    folder = tmp_path_factory.mktemp("server")
    working_directory, temporary_folder = folder / "old", folder / ("deep" * 20)
    working_directory.mkdir()
    temporary_folder.mkdir()
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.chdir(working_directory)
            monkeypatch.setenv("TMPDIR", str(temporary_folder))
            server = stack.enter_context(run_serve())
        working_directory.rmdir()
        yield server
