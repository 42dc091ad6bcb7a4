# Everything sets itself up: a .venv beside this file, with what pyproject.toml asks for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := setup.py $(wildcard plugins/native/kernels/*.[ch]) plugins/nccl/library.c
CORES := $(shell getconf _NPROCESSORS_ONLN)
# One process more than there are cores, as tests of real daemons wait now and then.
PARALLEL := -n $(shell expr $(CORES) + 1)
PACKAGES := bench cli daemon orchestrator plugins protocol training transport
# Else every process of the tests would compile their libraries again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test soak train gpu gpu-carry lint format docs protocol nccl wheels clean

demo: $(VENV)/installed
	$(BIN)/motley demo

test: $(VENV)/installed-dev
	$(BIN)/pytest $(PARALLEL)

# What takes too long for every commit: tests marked so, with clients of other houses, and eight times as many drawn examples.
soak: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[outside]"
	$(BIN)/pytest $(PARALLEL) -m "soak or hypothesis" --hypothesis-profile soak

# Training with torch, which the other targets leave out unless it is installed.
train: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[train]"
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) tests/training tests/e2e/faces/test_training.py

# On a machine with an NVIDIA GPU: its tests and measurements, in nine minutes, to bench/results.
gpu: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[gpu]"
	$(BIN)/python -m motley.bench.reports.gpu

# The same for a machine without a network that has CuPy, cuda-bindings, pytest and their company under Python GPU_PYTHON:
# makes build/gpu, some 25 MB. Take the tree there with it and with the C libraries, and in the tree:
#   tar -xf build/gpu/site.tar.xz
#   PYTHONPATH=build/gpu:build/gpu/site python3 -m motley.bench.reports.gpu --out SOMEWHERE
# Its steps "webgpu ..." want onnxruntime there, and NVIDIA's driver with its Vulkan part. Libraries that this part wants may
# be missing ("no Vulkan driver works here"): take Debian's packages libvulkan1 libegl1 libglvnd0 libgl1 libglx0 libx11-6
# libxext6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0 there, and unpack them with dpkg -x PACKAGE /, then ldconfig. Where no
# /sys/class/drm tells of the GPU, as in many containers, set MOTLEY_SOFTWARE_GPU=1, too: the plugin then asks Vulkan alone.
GPU_PYTHON ?= 3.12
gpu-carry: $(VENV)/installed-dev
	rm -rf build/gpu && mkdir -p build/gpu/motley
	for package in $(PACKAGES); do ln -sfn ../../../$$package build/gpu/motley/$$package; done
	$(BIN)/python -c "from setuptools import setup; setup()" --quiet egg_info --egg-base build/gpu
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --only-binary=:all: --target build/gpu/site \
		--python-version $(GPU_PYTHON) \
		$(foreach glibc,17 28 34,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		cffi cryptography grpcio llguidance platformdirs "protobuf>=7.35" pycparser pydantic==2.14.4 pydantic-core==2.50.5 \
		annotated-types typing-inspection regex threadpoolctl alembic mako sqlalchemy gguf spake2 zeroconf ifaddr onnxruntime-ep-webgpu vulkan
	tar -cJf build/gpu/site.tar.xz build/gpu/site && rm -r build/gpu/site

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --no-print-directory --jobs=2 types-linux types-win32

# mypy follows no import hooks, so it gets a tree of links in which the packages lie as they are imported; and platforms
# would throw each other's cache away.
types-%: $(VENV)/installed-dev
	mkdir -p build/types-$*/motley
	for package in $(PACKAGES); do ln -sfn ../../../$$package build/types-$*/motley/$$package; done
	MYPYPATH=build/types-$* $(BIN)/mypy --explicit-package-bases --cache-dir build/mypy-$* --platform $* -p motley

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The reference of commands, and a site of all pages in build/site.
docs: $(VENV)/installed-dev
	$(BIN)/python -m motley.cli.reference docs/commands.md
	$(BIN)/mkdocs build --strict

protocol: $(VENV)/installed-dev
	mkdir -p build/protocol
	$(BIN)/python -m grpc_tools.protoc --proto_path=motley/protocol=protocol \
		--python_out=build/protocol --pyi_out=build/protocol motley/protocol/mesh.proto motley/protocol/worker.proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=motley/protocol=protocol \
		--grpc_python_out=build/protocol motley/protocol/mesh.proto
	cp build/protocol/motley/protocol/*_pb2* protocol/

# Prints where the library is that makes NCCL's users run over Motley; installation has built it.
nccl: $(VENV)/installed
	$(BIN)/python -m motley.plugins.nccl

# What is published, to dist/: the sdist, and a wheel with the C libraries for each system, of which one compiler builds all.
wheels: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m build --sdist --quiet .
	for target in linux-x86_64 linux-aarch64 win-amd64 win-arm64; do \
		rm -rf build/lib* build/bdist.* build/temp.* *.egg-info && \
		MOTLEY_TARGET=$$target $(BIN)/python -m build --wheel --quiet . || exit 1; \
	done
	rm -rf build/lib* build/bdist.* build/temp.* *.egg-info
	$(BIN)/python -m pytest -q tests/test_wheels.py

$(VENV)/installed: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build *.egg-info plugins/native/_kernels.* plugins/nccl/libnccl.so.2 plugins/nccl/nccl.dll
