"""What the range study compares: cases of a range, its calibration, noise, anchor, precision, steps and seeds.

A case is a shipped config with all that the study varies set explicitly, so that another default changes no result.
"""

from dataclasses import dataclass
from pathlib import Path

from shared.config_file import load_config
from study_noise import Noise
from study_runner import Arm

MOE, DEMO = Path("scripts/configs/tiny_moe.toml"), Path("scripts/configs/demo.toml")

# Name: low, high, clip.sizing.
RANGES = {
    "paper": (3e-4, 4e-4, "off"),
    "middle": (3e-3, 4e-3, "off"),
    "wide": (3e-2, 4e-2, "off"),
    "sized": (3e-4, 4e-4, "drift"),
}
# What a bfloat16 engine and learner differ by (study_mismatch.md), put on a float32 engine.
NOISE = Noise(spread=0.067)
NOISY_MAX_MISMATCH = 0.25

MOE_SEEDS, MOE_STEPS = (0, 1, 2), 40
DEMO_SEEDS, DEMO_STEPS = (0, 1), 15


@dataclass(frozen=True)
class Case:
    """One setting, run with several seeds. `base`: the config file it starts from; `range`: a key of RANGES."""

    base: Path
    range: str
    seeds: tuple[int, ...]
    steps: int
    calibration: str = "none"
    anchor: str = "engine"
    precision: str = "float32"
    noise: Noise | None = None

    @property
    def label(self) -> str:
        """As tables name it; noise and precision are in their headings."""
        how = {"none": "fixed", "measured": "calibrated"}[self.calibration]
        return f"{self.range}, recomputed anchor" if self.anchor == "recompute" else f"{self.range}, {how}"

    def arm(self, seed: int) -> Arm:
        """The run of one seed."""
        low, high, sizing = RANGES[self.range]
        is_demo = self.base == DEMO
        overrides = [
            f"run.seed={seed}",
            f"model.precision={self.precision}",
            f"learner.steps={self.steps}",
            f"learner.anchor={self.anchor}",
            f"clip.low={low}",
            f"clip.high={high}",
            f"clip.sizing={sizing}",
            f"clip.calibration={self.calibration}",
            f"sync.max_staleness={int(is_demo)}",
            "sync.probe_sequences=4",
            f"evaluation.samples={int(not is_demo)}",
        ]
        if self.noise:
            overrides.append(f"sync.max_mismatch={NOISY_MAX_MISMATCH}")
        how = "recompute" if self.anchor == "recompute" else self.calibration
        kind = f"demo-{self.precision}" if is_demo else f"moe-{'noise' if self.noise else 'exact'}"
        return Arm(f"{kind}-{self.range}-{how}-seed{seed}", load_config(self.base, overrides), self.noise)


def _moe_cases(noise: Noise | None, seeds: tuple[int, ...], steps: int) -> list[Case]:
    fitted = [
        Case(MOE, name, seeds, steps, calibration=calibration, noise=noise)
        for name in ("paper", "sized", "wide")
        for calibration in ("none", "measured")
    ]
    return [*fitted, Case(MOE, "wide", seeds, steps, anchor="recompute", noise=noise)]


MOE_CASES = tuple(case for noise in (None, NOISE) for case in _moe_cases(noise, MOE_SEEDS, MOE_STEPS))

SHORT_CASES = tuple(
    case
    for noise in (None, NOISE)
    for case in _moe_cases(noise, seeds=(0,), steps=3)
    if (case.range, case.calibration, case.anchor, case.noise)
    in {
        ("wide", "none", "engine", None),
        ("paper", "none", "engine", NOISE),
        ("paper", "measured", "engine", NOISE),
        ("wide", "none", "recompute", NOISE),
    }
)

DEMO_CASES = (
    *[Case(DEMO, name, DEMO_SEEDS[:1], DEMO_STEPS) for name in ("middle", "wide")],
    *[
        Case(DEMO, name, seeds, DEMO_STEPS, calibration, anchor, precision="bfloat16")
        for name, seeds in (("middle", DEMO_SEEDS[:1]), ("wide", DEMO_SEEDS))
        for calibration, anchor in (("none", "engine"), ("measured", "engine"), ("none", "recompute"))
    ],
)
