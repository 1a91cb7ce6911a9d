# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from verl.utils.distributed import initialize_process_group


@pytest.fixture(scope="session", autouse=True)
def process_group_of_both_devices() -> None:
    """Reference values come from the CPU in the same process, and whoever comes first decides the group's backends."""
    if torch.cuda.is_available():
        initialize_process_group(torch.device("cuda"))
