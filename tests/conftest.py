"""One thread for all tests: tiny models gain nothing from more, and two busy cores cost a lot."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
