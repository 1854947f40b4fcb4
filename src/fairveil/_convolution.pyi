from collections.abc import Sequence
from typing import Any

LEVEL: int

def gradients(
    x: Any, g: Any, out: Any, sums: Any, lengths: Any, stride: Sequence[int], padding: Sequence[int], dilation: int,
    level: int,
) -> bool: ...  # fmt: skip
