import pytest
import torch

from tests.integration.conftest import world

__all__ = ["world"]


@pytest.fixture(autouse=True)
def graphs_of_its_own():
    """torch counts the shapes of one function over a whole process, and each test has others."""
    torch._dynamo.reset()
