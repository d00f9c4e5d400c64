"""Group-relative advantages: pure NumPy in float64.

Example: rewards [1, 0, 0, 0, 0, 0, 0, 0] have mean 1/8 and sample standard deviation 0.3536; the first rollout's
advantage is 2.475, the others' -0.3536.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def group_advantages(rewards_G: Sequence[float | None]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """A_i = (r_i - mean(r)) / std(r) over the scored members of one group (arXiv 2507.18071, equation 6).

    The standard deviation is that of a sample (n - 1), with no epsilon. Rewards that are all equal are recognized by
    max == min and give exactly 0: rounding in the mean of eight 0.7 would otherwise be blown up to an advantage.
    Members that could not be scored (None or NaN) are left out of mean and deviation and get 0; with fewer than two
    scored members there is nothing to compare and all get 0.

    Returns:
        advantages_G (float64 [G]) and scored_G (bool [G], False where the reward is None or NaN).

    Raises:
        ValueError: a reward is infinite.
    """
    values_G = np.array([np.nan if r is None else r for r in rewards_G], dtype=np.float64)
    if np.isinf(values_G).any():
        raise ValueError(
            f"rewards {list(rewards_G)} hold an infinite value: return a finite reward, or None if unscored"
        )
    scored_G = ~np.isnan(values_G)
    advantages_G = np.zeros(len(values_G))
    scored = values_G[scored_G]
    if len(scored) < 2 or scored.max() == scored.min():
        return advantages_G, scored_G
    # Advantages do not change under shift and scale; on [0, 1] squares of tiny rewards cannot underflow to std 0.
    unit = (scored - scored.min()) / (scored.max() - scored.min())
    advantages_G[scored_G] = (unit - unit.mean()) / unit.std(ddof=1)
    return advantages_G, scored_G
