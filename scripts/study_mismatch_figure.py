"""The picture of the mismatch study."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from study_mismatch_analysis import LENGTHS, PAPER
from study_mismatch_tables import Cell

_SHOWN = {"float32": "C0", "float16": "C2", "bfloat16": "C3", "bfloat16-float32-head": "C1"}


def draw(cells: Sequence[Cell], out: Path) -> None:
    """Noise, clipped shares and the spread of tokens at temperature 1, by mode."""
    shown = [cell for cell in cells if cell.name in _SHOWN and cell.temperature == 1.0]
    figure, (noise, clipped, tokens) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for cell in shown:
        lengths, color = [f.length for f in cell.by_length], _SHOWN[cell.name]
        noise.plot(lengths, [f.quantiles[0] for f in cell.by_length], "o-", color=color, label=f"{cell.name}: median")
        noise.plot(lengths, [f.quantiles[2] for f in cell.by_length], ":", color=color, label=f"{cell.name}: 99 %")
        middles = [(b.low + b.high) / 2 for b in cell.bins]
        tokens.plot(middles, [b.spread for b in cell.bins], "o-", color=color, label=cell.name)
    noise.axhline(PAPER.high, color="black", lw=1, label="the paper's range, 4e-4")
    _draw_clipped(clipped, next((cell for cell in shown if cell.name == "bfloat16"), None))
    noise.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="|log s|, nats a token", title="Noise before any update"
    )
    tokens.set(yscale="log", xlabel="probability of the token", ylabel="spread of d, nats", title="Single tokens")
    noise.set_ylim(3e-9, 0.3)
    for axis in (noise, clipped):
        axis.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        axis.minorticks_off()
    for axis, place, columns in ((noise, "lower left", 2), (clipped, "upper left", 1), (tokens, "lower left", 1)):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small", loc=place, ncols=columns, handlelength=3)
    figure.savefig(out, dpi=110)


def _draw_clipped(axis: plt.Axes, cell: Cell | None) -> None:
    axis.axhspan(0.01, 0.05, color="C0", alpha=0.12, label="1-5 %")
    for kind, style in (("fixed", "--"), ("calibrated", "-")):
        for sign, color in (("good", "C0"), ("bad", "C3")) if cell else ():
            figures = cell.by_length if cell else []
            shares = [getattr(getattr(f, kind), sign) for f in figures]
            below, above = ([s.value - s.low for s in shares], [s.high - s.value for s in shares])
            label = f"{'paper' if kind == 'fixed' else 'calibrated'}, A {'>' if sign == 'good' else '<'} 0"
            axis.errorbar(
                [f.length for f in figures], [s.value for s in shares], (below, above), fmt=f"o{style}", color=color,
                capsize=3, label=label,
            )  # fmt: skip
    axis.set(xscale="log", ylim=(0, 1), xlabel="tokens", ylabel="clipped share", title="bfloat16: clipped, no update")
