from typing import Any

LEVEL: int

def add(total: Any, std: float, grid: float, source: Any, block: int, level: int) -> None: ...
