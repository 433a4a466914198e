"""Services that tests of several folders use: started once, when the first test asks, stopped for certain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services import MooncakeServer, S3Server, mooncake_server, s3_server


@pytest.fixture(scope="session")
def s3_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server; nothing in this process's environment points there (see `s3_environment`)."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def s3_environment(s3_service: S3Server) -> Iterator[S3Server]:
    """The same, with endpoint and credentials in the environment as a user would have them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_service.environment.items():
            patch.setenv(name, value)
        yield s3_service


@pytest.fixture(scope="session")
def mooncake_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    """A real mooncake_master with 512 MiB of memory lent to it."""
    with mooncake_server(tmp_path_factory.mktemp("mooncake")) as server:
        yield server
