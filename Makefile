# `make demo` and `make test` work from a fresh clone: they set up .venv first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-core bench check format clean

demo: $(VENV)/.installed
	$(RUN)/python examples/digits.py

test: $(VENV)/.installed check
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(WORKERS) --dist loadfile

test-core: $(VENV)/.installed check
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore tests/integrations

bench: $(VENV)/.installed
	$(RUN)/pip install --quiet --no-deps torch-pruning
	$(RUN)/python benchmarks/run.py

check: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(VENV)/.installed
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[dev,vision,hf,lightning,onnx]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist
