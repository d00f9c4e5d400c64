"""Makes the fakes importable, as they are in the processes of integration tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.register_assert_rewrite("engine_contract")
