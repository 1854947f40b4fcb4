PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-flower check bench install clean

install: .venv/installed

# torch first and pinned: a range would pull several gigabytes of CUDA. The rest as resolved in requirements.lock.
.venv/installed: pyproject.toml requirements.lock setup.py $(wildcard src/fairveil/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fairveil needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -m "not slow and not flower" -n 2

test-all: install
	$(BIN)/python -m pytest -m "not flower" -n 2

# federations on this machine's own address; each process is stopped by its id
test-flower: install
	timeout 900 $(BIN)/python -m pytest -m flower -n 2 --dist loadfile tests/flower tests/engine/test_ray.py

# about a quarter of an hour on a machine that does nothing else
bench: install
	$(BIN)/python -m benchmarks

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv benchmarks/.venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
