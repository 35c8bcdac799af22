"""Figure 1: the utility of player 2 on the sphere is a sinusoid whose angular axis is warped by B."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from matplotlib.figure import Figure

import eigenstream as es
from experiments.common import command_line, save, write_csv, write_page

#: The example of the paper's appendix B.
A = np.array([[0.77759061, 0.26842584], [0.26842584, 0.87788983]])
B = np.array([[0.2325605, 0.06042127], [0.06042127, 0.03241424]])


class Found(NamedTuple):
    #: Angles of player 2 in the plane, and three forms of its utility, with player 1 at its eigenvector.
    angles: np.ndarray
    utility: np.ndarray
    deflated: np.ndarray
    cosine: np.ndarray
    #: Angles of the two eigenvectors, in the same plane.
    directions: np.ndarray
    eigenvalues: np.ndarray

    @property
    def apart(self) -> float:
        """The angle between the two eigenvectors, in degrees."""
        gap = abs(self.directions[0] - self.directions[1]) % 180
        return float(min(gap, 180 - gap))

    @property
    def disagreement(self) -> float:
        forms = np.stack([self.utility, self.deflated, self.cosine])
        return float(np.ptp(forms, axis=0).max() / self.eigenvalues[1])


def run(points: int = 721) -> Found:
    lam, V = scipy.linalg.eigh(A, B)
    lam, V = lam[::-1], V[:, ::-1]
    angles = np.linspace(0, 360, points)
    players = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    parent = V[:, 0]

    def utility(player: np.ndarray) -> float:
        pair = np.stack([parent, player])
        return float(es.solvers.utilities(pair, pair @ A, pair @ B)[1])

    b = np.einsum("ni,ij,nj->n", players, B, players)
    deflated = A - np.outer(B @ parent, parent @ A) / (parent @ B @ parent)
    # v = Σ w_p v_p, eigenvectors of unit B-norm: z_p = w_p² / Σ w², and the utility is Σ_{j≥2} λ_j z_j.
    # The squared cosine of the warped angle is z_2.
    w = np.linalg.solve(V, players.T)
    warped = np.arctan2(w[0], w[1])
    return Found(
        angles,
        np.array([utility(player) for player in players]),
        np.einsum("ni,ij,nj->n", players, deflated, players) / b,
        lam[1] * np.cos(warped) ** 2,
        np.degrees(np.arctan2(V[1], V[0])) % 180,
        lam,
    )


def draw(found: Found, path: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    forms: list[tuple[Any, str, str, float]] = [
        (found.utility, "utility, equation 3", "-", 5.0),
        (found.deflated, "Rayleigh quotient of the deflated A", "--", 3.0),
        (found.cosine, "λ₂ cos² of the warped angle", ":", 1.5),
    ]
    for (values, label, style, width), shade in zip(forms, ("0.75", "C1", "black"), strict=True):
        axes.plot(found.angles, values, style, linewidth=width, color=shade, label=label)
    for turn in (0, 180):
        first, second = found.directions + turn
        axes.axvline(first, linestyle="--", color="C0", linewidth=1, label=None if turn else "first eigenvector")
        axes.axvline(second, linestyle="-", color="C0", linewidth=1, label=None if turn else "second eigenvector")
    axes.set(xlabel="angle of player 2 (degrees)", ylabel="utility of player 2", xlim=(0, 360))
    axes.set_xticks(range(0, 361, 45))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.22), ncol=3)
    save(figure, path)


def report(found: Found, out: Path) -> None:
    draw(found, out / "sinusoid")
    write_csv(
        out / "sinusoid.csv",
        {
            "degrees": found.angles,
            "utility": found.utility,
            "deflated Rayleigh quotient": found.deflated,
            "warped cosine": found.cosine,
        },
    )
    agree, match = found.disagreement < 1e-4, abs(found.apart - 71) < 0.5
    write_page(
        out / "sinusoid.md",
        "The utility is a warped sinusoid (figure 1)",
        "Each player's utility is a sinusoid on the sphere whose angular axis is deformed by `B`. Three ways to "
        "write it give the same curve. It is 0 at the parent and λ₂ at the second eigenvector. In the paper's 2×2 "
        "example the two eigenvectors are 71° apart.",
        f"{'Holds' if agree and match else 'Does not hold'}: the eigenvectors are {found.apart:.1f}° apart, and "
        f"the three forms differ by at most {found.disagreement:.0e} of λ₂ (the first is computed in float32).",
        f"""
![utility of player 2 against its angle](sinusoid.png)

λ = {found.eigenvalues[0]:.3f}, {found.eigenvalues[1]:.3f}. On the grid of {len(found.angles)} angles the largest
utility is {found.utility.max():.4f} and the smallest {found.utility.min():.1e}. Data: [sinusoid.csv](sinusoid.csv).
""",
    )


if __name__ == "__main__":
    command_line(lambda out: report(run(), out))
