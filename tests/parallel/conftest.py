from collections.abc import Iterator

import pytest

from titan_adapters.parallel.dry_run import fake_process_group


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """A process group of four in which this process is rank 0 and the others do nothing."""
    with fake_process_group(0, 4):
        yield
