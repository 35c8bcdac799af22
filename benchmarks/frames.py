"""Count the calls between ``fit`` and the matrix product of the exact solver.

python benchmarks/frames.py
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np

import eigenstream as es
from eigenstream.core import moments

LIBRARY = Path(es.__file__).parent


def main() -> None:
    product, stacks = moments._added, []

    def watched(*arguments: Any) -> Any:
        stacks.append([f for f in traceback.extract_stack()[:-1] if LIBRARY in Path(f.filename).parents])
        return product(*arguments)

    moments._added = watched
    X, Y = np.random.default_rng(0).normal(size=(2, 500, 5))
    es.CCA(2).fit(X, Y)
    for frame in stacks[0]:
        print(f"{Path(frame.filename).relative_to(LIBRARY)}: {frame.name}")
    print(f"{len(stacks[0])} frames from fit to the product")


if __name__ == "__main__":
    main()
