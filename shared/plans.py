"""Step plans and calibrations as JSON: what the ledger and checkpoints keep of them."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shared.records import Calibration, ClipRange, GroupId, Mismatch, StepPlan


def plan_text(plan: StepPlan) -> str:
    return json.dumps(asdict(plan))


def plan_of(text: str) -> StepPlan:
    """The plan that `plan_text` wrote. KeyError or TypeError for anything else."""
    values = json.loads(text)
    return StepPlan(
        step=values["step"],
        groups=tuple(GroupId(**group) for group in values["groups"]),
        minibatch_seed=values["minibatch_seed"],
        clip=ClipRange(**values["clip"]),
        calibration=calibration_of(values["calibration"]),
    )


def calibration_of(values: Mapping[str, Any]) -> Calibration:
    """A calibration from its fields as plain values (`dataclasses.asdict`). TypeError for other fields."""
    parts = {name: None if values[name] is None else Mismatch(**values[name]) for name in ("mismatch", "probe")}
    return Calibration(**{**values, **parts})
