# Every target is one line that calls a tool or a script. `make` alone lists them.
.DEFAULT_GOAL := help
# Empty means the first suitable one of python3, python3.13, python3.12 and python3.11. An existing .venv is kept.
PYTHON ?=
GPU_PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: help proto demo up docs test test-clients test-install test-page test-avx2 wheels-gpu test-gpu verify fix bench-parity bench-optimizers bench-paging bench-train bench-runs bench-publish bench-soak bench-stream bench-sample bench-versions bench-overload bench-journal bench-saves bench-shared bench-http models chaos power-cuts client-faults fuzz images clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/.installed: requirements/cpu.txt requirements/dev.txt requirements/trl.txt pyproject.toml scripts/install.sh scripts/check_install.py
	@scripts/install.sh $(VENV) $(PYTHON)

$(VENV)/trl: requirements/bench.txt requirements/trl.txt $(VENV)/.installed
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $< && touch $@

$(VENV)/docs: requirements/docs.txt $(VENV)/.installed
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $< && touch $@

proto: $(VENV)/.installed ## Generate the typed gRPC stubs and a deployment's secrets
	@$(RUN)/python scripts/gen_protos.py && $(RUN)/python scripts/make_secrets.py

demo: proto ## Train the embedded model by reinforcement learning, end to end
	@$(RUN)/python scripts/demo.py

up: proto ## Run the three services with the embedded model until Ctrl-C
	@exec $(RUN)/paceline up --model "$$($(RUN)/python scripts/make_model.py)"

test: proto ## Run every test that needs neither a GPU nor a browser
	@scripts/test.sh $(RUN)

test-clients: proto ## Run every release of Tinker's SDK against the services
	@OMP_NUM_THREADS=1 UPDATE=$(UPDATE) $(RUN)/python -m pytest -m clients tests/clients

test-install: proto ## Run README.md's lines that install, in empty environments
	@$(RUN)/python -m pytest -m install tests/deploy

test-page: proto ## Run the tests of the gateway's page in Chromium, which is installed if it may be
	@UPDATE=$(UPDATE) scripts/test_page.sh $(RUN)

test-avx2: proto ## Run the tests that compare numbers, with AVX2 only
	@scripts/test_avx2.sh $(RUN)

wheels-gpu: proto ## Collect the wheels that an offline GPU machine lacks, in wheels/
	@$(RUN)/python scripts/wheels_gpu.py wheels

test-gpu: ## Install from wheels/ beside the machine's torch; run the tests and benches that need a GPU
	@scripts/test_gpu.sh $(GPU_PYTHON) $(VENV)-gpu wheels

verify: proto ## Check style, types, layers and contracts
	@scripts/verify.sh $(RUN)

fix: proto ## Fix style where a tool can
	@$(RUN)/ruff check --fix -q . ; $(RUN)/ruff format -q .

docs: proto $(VENV)/docs ## Build the documentation as a site, in build/site
	@PYTHONPATH=$(VENV)/docs $(RUN)/python scripts/docs_site.py

bench-parity: proto ## Compare log-probabilities of trainer and sampler, beside stock transformers and vLLM
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.parity

bench-optimizers: proto ## Measure each optimizer's state and step
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.memory.optimizers

bench-paging: proto ## Measure paging runs out and in, and the memory that many runs hold
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.memory.paging

bench-train: proto $(VENV)/trl ## Time the trainer beside transformers and PEFT, padded and one at a time, and TRL
	@$(RUN)/python -m bench.train

bench-sample: proto ## Time sampling beside vLLM's own server, vLLM in process, and its LoRA operators
	@$(RUN)/python -m bench.sample

bench-runs: proto ## Time eight runs in joint passes, one after the other, and as one run with all tokens
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.train.runs

bench-publish: proto ## Time publishing beside PEFT and vLLM's own HTTP server, under load
	@$(RUN)/python -m bench.publish

bench-http: proto ## Time Tinker's SDK over HTTP beside the gRPC client, and heartbeats under load
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.http

bench-shared: proto ## Measure what sharing one copy of the base model saves and costs, and writes in place
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.memory.shared

bench-soak: proto ## Publish for minutes under load and score every token at its version
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.soak

bench-stream: proto ## Time the stream of weights beside the same stream as plain protobuf
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.publish.stream

bench-versions: proto ## Time versions that are loaded again: 64 in turn on 4 slots
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.publish.versions

bench-overload: proto ## Measure a sampler's goodput under ten times the load that it admits
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.sample.overload

bench-journal: proto ## Measure what the journal costs a training step
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.durability.journal

bench-saves: proto ## Measure how long a save and a publish hold up training
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.durability.saves

models: proto ## Regenerate the table of docs/models.md
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN)/python scripts/models_table.py

chaos: proto ## Kill trainer, engine, sampler and gateway 2,000 times, and check that nothing is lost
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.durability.chaos $(KILLS)

power-cuts: proto ## Start the trainer on what 1,000 power cuts leave, and check that nothing is lost
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.durability.power_cuts $(CUTS)

client-faults: proto ## Issue commands through a network that fails by 2,000 plans, and check what the client says
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.durability.client_faults $(PLANS)

fuzz: proto ## Send 1,000,000 hostile calls to the services while another tenant trains
	@OMP_NUM_THREADS=1 $(RUN)/python -m bench.hostile.fuzz $(CASES)

images: proto ## Build the three container images for CPU
	@deploy/build-images.sh cpu

clean: ## Remove what make created here, but no secrets, results or cached model; it names these
	@scripts/clean.sh $(VENV) $(VENV)-gpu wheels .paceline dist build *.egg-info .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis paceline/*/v1
