PYTHON ?= python3
JOBS ?= 8
RUN = .venv/bin/python

.PHONY: demo lint test coverage test-quick test-nightly mutation test-gpu bench environment clean
demo:
	$(PYTHON) tests/kit/environment.py 0.5.18
	$(RUN) tests/kit/demo.py

lint:
	$(PYTHON) tests/kit/environment.py --quick
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: environment
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not nightly" tests

# The same, and which branches of the package ran, counted in all processes.
coverage: environment
	rm -rf build/coverage && mkdir -p build/coverage
	$(RUN) -m coverage run --rcfile=setup.cfg -m pytest -n 2 --dist loadgroup -m "not nightly" tests
	$(RUN) -m coverage combine --rcfile=setup.cfg -q
	$(RUN) -m coverage report --rcfile=setup.cfg --fail-under=95

test-quick:
	$(PYTHON) tests/kit/environment.py --quick
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not slow and not nightly" tests

# 10,000 random batches of each kind, and servers whose faults `test` has in other forms; an hour on two cores.
test-nightly: environment
	HYPOTHESIS_PROFILE=nightly $(RUN) -m pytest -n 2 --dist loadgroup tests/behaviour/test_properties.py
	$(RUN) -m pytest -n 2 --dist loadgroup -m nightly tests

# Which guards no test would miss; ten minutes.
mutation: environment
	$(RUN) tests/kit/mutation.py

# On a machine with a GPU, in a Python that has torch, triton, wrapt, pytest and pytest-xdist. SGLang's own code
# runs too, where releases lie in $SGLANG_AITER_EXT_CACHE/cp312/sglang-RELEASE (cp311 for Python 3.11), as
# tests/kit/environment.py installs them, and this Python has what they need on a GPU. What is not there is skipped by name.
test-gpu:
	$(PYTHON) -m pytest -n $(JOBS) --dist loadgroup -m gpu tests/gpu

bench:
	$(PYTHON) -m bench

environment:
	$(PYTHON) tests/kit/environment.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache
