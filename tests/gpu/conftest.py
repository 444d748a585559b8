from tests.integration.conftest import world

__all__ = ["world"]
