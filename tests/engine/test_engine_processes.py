"""No process of an engine outlives the process that holds it, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full]

SHARED_MEMORY = Path("/dev/shm")
HOLDER = """
import asyncio, sys
from rollout.engine import VllmEngine
from shared.config import Config

async def main():
    model, rollout = {"path": sys.argv[1], "precision": "float32"}, {"max_model_len": 128}
    engine = await VllmEngine.create(Config.model_validate({"model": model, "rollout": rollout}))
    print("ready", flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_kill_9_of_the_holder_leaves_no_engine_process(moe_path: Path, tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir())
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    holder = subprocess.Popen([sys.executable, script, moe_path], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert holder.stdout is not None
        assert any(line.strip() == "ready" for line in holder.stdout)
        children = psutil.Process(holder.pid).children(recursive=True)
        assert {"EngineCore", "Worker"} <= {name.split("::")[-1] for child in children for name in child.cmdline()[:1]}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        deadline_s = time.monotonic() + 10
        while (left := [child for child in children if child.is_running()]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert left == []
        assert set(SHARED_MEMORY.iterdir()) - before == set()
    finally:
        holder.kill()
