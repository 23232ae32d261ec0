# Every target is one line that calls a tool or a script. `make` alone lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin

.PHONY: help proto demo up test test-gpu verify fix bench-parity bench-optimizers bench-train bench-publish bench-journal chaos images clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: requirements/cpu.txt requirements/dev.txt pyproject.toml scripts/install.sh
	@scripts/install.sh $(PYTHON) $(VENV)

proto: $(VENV)/.installed ## Generate the typed gRPC stubs, and the secrets of a deployment
	@$(RUN)/python scripts/gen_protos.py && $(RUN)/python scripts/make_secrets.py

demo: proto ## Train the embedded model by reinforcement learning, end to end
	@$(RUN)/python scripts/demo.py

up: proto ## Run the three services with the embedded model until Ctrl-C
	@$(RUN)/paceline up --model "$$($(RUN)/python scripts/make_model.py)"

test: proto ## Run every test that needs no GPU
	@scripts/test.sh $(RUN)

test-gpu: proto ## Run the tests that need a GPU
	@$(RUN)/python -m pytest -m gpu tests

verify: proto ## Check style, types, layers and contracts
	@scripts/verify.sh $(RUN)

fix: proto ## Repair style where a tool can
	@$(RUN)/ruff check --fix -q . ; $(RUN)/ruff format -q .

bench-parity: proto ## Compare trainer's and sampler's log-probabilities, beside stock transformers and vLLM
	@OMP_NUM_THREADS=1 $(RUN)/python bench/logprob_parity.py

bench-optimizers: proto ## Measure each optimizer's state and step
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN)/python bench/optimizer_memory.py

bench-train: proto ## Time the trainer beside padded and one-at-a-time transformers and PEFT
	@$(RUN)/python bench/train.py

bench-publish: proto ## Time publishing beside PEFT and vLLM's own HTTP server, under load
	@OMP_NUM_THREADS=1 $(RUN)/python bench/publish.py

bench-journal: proto ## Measure what the journal costs a training step
	@OMP_NUM_THREADS=1 $(RUN)/python bench/journal_cost.py

chaos: proto ## Kill the trainer 1,000 times while it trains, and check that nothing is lost
	@OMP_NUM_THREADS=1 $(RUN)/python bench/chaos.py $(KILLS)

images: proto ## Build the three container images for CPU
	@deploy/build-images.sh cpu

clean: ## Remove everything that was made here
	@rm -rf $(VENV) .paceline dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis paceline/*/v1
