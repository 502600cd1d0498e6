PYTHON ?= python3
JOBS ?= 8
RUN = .venv/bin/python

.PHONY: demo test test-quick test-gpu bench environment clean
demo:
	$(PYTHON) tests/environment.py 0.5.18
	$(RUN) tests/demo.py

test: environment
	$(RUN) -m pytest -n 2 --dist loadgroup tests

test-quick:
	$(PYTHON) tests/environment.py --quick
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not slow" tests

# On a machine with a GPU, in a Python that has torch, triton, wrapt, pytest and pytest-xdist. SGLang's own code
# runs too, where releases lie in $SGLANG_AITER_EXT_CACHE/cp312/sglang-RELEASE (cp311 for Python 3.11), as
# tests/environment.py installs them, and this Python has what they need on a GPU. What is not there is skipped by name.
test-gpu:
	$(PYTHON) -m pytest -n $(JOBS) --dist loadgroup -m gpu tests/test_gpu*.py

bench:
	$(PYTHON) -m bench

environment:
	$(PYTHON) tests/environment.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache
