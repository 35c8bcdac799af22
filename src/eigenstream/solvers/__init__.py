"""The solvers: settings in a frozen dataclass, with pure ``init`` and ``step``."""

from eigenstream.solvers.baselines import SGHA, EckartYoung, Oja
from eigenstream.solvers.exact import Exact
from eigenstream.solvers.game import Game
from eigenstream.solvers.paper import Paper, Smooth, direction, gradient, utilities
from eigenstream.solvers.rsg import RSGPlus
from eigenstream.solvers.schedules import warmup_harmonic
from eigenstream.solvers.stochastic import Info, State, Stochastic

__all__ = [
    "SGHA",
    "EckartYoung",
    "Exact",
    "Game",
    "Info",
    "Oja",
    "Paper",
    "RSGPlus",
    "Smooth",
    "State",
    "Stochastic",
    "direction",
    "gradient",
    "utilities",
    "warmup_harmonic",
]
