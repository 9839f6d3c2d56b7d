# The table of contents for developers. Every target makes the environment it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt

.PHONY: install demo check test long lint model dst killloop host-kills amendments powercut restores realign-kills guides load poison lies trainers harness chaos fuzz schema rehearse bench quality scavenging hundred-million docs site clean
.DEFAULT_GOAL := install

install: .venv/.stamp            ## the command `diloco` in .venv

.venv/.stamp: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"error: diloco needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}\nhint: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "installing diloco into .venv; the first time this takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -e .
	@$(BIN)/python -m diloco_cli.wire.kernels.jit
	@touch $@

.venv/.stamp-test: .venv/.stamp
	@echo "installing the tools for tests and lint into .venv"
	@$(PIP) -e '.[test]'
	@touch $@

PROMPT ?= def __init__(self,

demo: install                    ## two regions pretrain one model on this machine; what it writes before and after
	$(BIN)/diloco run pipelines/quickstart.yaml
	$(BIN)/diloco generate runs/quickstart --version 0 --prompt '$(PROMPT)' --temperature 0.5
	$(BIN)/diloco generate runs/quickstart --prompt '$(PROMPT)' --temperature 0.5

check: lint                      ## lint and every quick test: for the time between two edits
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not live" --ignore tests/verify --ignore tests/bench

test: .venv/.stamp-test          ## everything CI checks, on two cores in minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

long: .venv/.stamp-test          ## the live tests that take longest, which `make test` leaves out
	$(BIN)/python -m pytest -m long

lint: .venv/.stamp-test          ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

model: .venv/.stamp-test         ## thousands of seeds of the crash model
	$(BIN)/python -m tests.verify.model.explore --seeds 3000 --every-crash-point
	$(BIN)/python -m tests.verify.rebuild.explore --seeds 4000 --rules

host-kills: .venv/.stamp-test    ## a region of two hosts killed at every failpoint and 100 times at random; goes on where it stopped
	nice -n 10 $(BIN)/python -m tests.verify.regions.host_kills --kills 100 --results build/host-kills.jsonl

SEEDS ?= 10000
FROM ?= 0

dst: .venv/.stamp-test           ## the real server on simulated bad days: make dst SEEDS=500 FROM=0
	$(BIN)/python -m tests.verify.dst.explore --bugs
	$(BIN)/python -m tests.verify.dst.explore --every-step
	$(BIN)/python -m tests.verify.dst.explore --seeds $(SEEDS) --from $(FROM)

killloop: .venv/.stamp-test      ## 1,000 SIGKILLs of a server under load; goes on where it stopped
	nice -n 10 $(BIN)/python -m tests.verify.durability.killloop --kills 1000 --results build/killloop.jsonl

amendments: .venv/.stamp-test    ## 50 amendments of a run under load, 20 SIGKILLs of its server
	nice -n 10 $(BIN)/python -m tests.verify.durability.amendments --amendments 50 --kills 20

powercut: .venv/.stamp-test      ## 200 power cuts of a server's disk; needs root
	nice -n 10 $(BIN)/python -m tests.verify.durability.powercut --cuts 200

restores: .venv/.stamp-test      ## 50 copies of a server under load brought back, its regions ahead of most; goes on where it stopped
	nice -n 10 $(BIN)/python -m tests.verify.durability.restores --restores 50 --results build/restores.jsonl

realign-kills: .venv/.stamp-test ## 16 servers lost or set back, a SIGKILL at every step of going on; goes on where it stopped
	nice -n 10 $(BIN)/python -m tests.verify.rebuild.kills --results build/realign-kills.jsonl

guides: .venv/.stamp-test        ## every command of the guides for several hosts, on hosts in network namespaces; needs root
	$(BIN)/python -m tests.verify.guides.follow

load: .venv/.stamp-test          ## 256 clients for ten minutes: uploads a second, the server's memory
	$(BIN)/python -m tests.verify.load.many --clients 256 --seconds 600 --json build/load.json

STORM ?= tests/verify/results/eight-regions.yaml

fuzz: .venv/.stamp-test          ## a million bad inputs for each decoder and engine
	@$(PIP) -e '.[fuzz]'
	$(BIN)/python -m tests.verify.fuzz.engines $(FUZZ)

poison: .venv/.stamp-test        ## one region of eight lies, in every way we know
	$(BIN)/python -m tests.verify.poison.lying_region

lies: .venv/.stamp-test          ## a hundred thousand frames whose headers say anything
	$(BIN)/python -m tests.verify.poison.lying_frames

harness: .venv/.stamp-test       ## lm-eval on an exported model, offline
	@$(PIP) -e '.[test,lm-eval]'
	$(BIN)/python -m pytest -q tests/cli/test_harness.py

trainers: .venv/.stamp-test      ## loops of others: 20 SIGKILLs, the cost of the API, digits in four regions and in one
	$(BIN)/python -m tests.verify.trainers.kills --kills 20
	$(BIN)/python -m tests.verify.trainers.kills --kills 20 --regions jax,torch,torchrun
	$(BIN)/python -m tests.verify.trainers.overhead
	$(BIN)/python -m tests.verify.trainers.metrics_cost
	$(BIN)/python -m tests.verify.trainers.digits

chaos: .venv/.stamp-test         ## eight regions under SIGKILLs, three ways to train; goes on where it stopped
	for rate in 324 125; do for method in decoupled elastic rigid; do \
		test -f build/chaos/$$rate-$$method/chaos.json || $(BIN)/diloco chaos $(STORM) --method $$method --fresh \
			--dir build/chaos/$$rate-$$method --set "chaos.faults=[{kind: kill-trainer, per_hour: $$rate}]" || exit 1; \
	done; done
	$(BIN)/python -m tests.verify.results.goodput build/chaos/[0-9]*-[a-z]*[a-z]/chaos.json --png build/chaos/goodput.png

rehearse: .venv/.stamp-test      ## every published table the simulator repeats, cell by cell
	for preset in streaming-table4 decoupled-table1 dp-bandwidth hetero llama3 12b-four-regions planet; do \
		$(BIN)/diloco simulate $$preset || exit 1; \
	done

schema: .venv/.stamp-test        ## thousands of requests made up from /openapi.json
	SCHEMA_EXAMPLES=400 $(BIN)/python -m pytest -rP tests/security/test_schema.py

bench: .venv/.stamp-test         ## figures, each beside its limit from the same run
	$(BIN)/diloco bench start
	$(BIN)/diloco bench inner
	$(BIN)/diloco bench inner --hosts 2
	$(BIN)/diloco bench wire
	$(BIN)/diloco bench link
	$(BIN)/diloco bench recovery

scavenging: .venv/.stamp-test    ## two steady regions and six that come and go, for twenty minutes; then steady ones
	$(BIN)/python -m tests.verify.results.scavenging --out build/scavenging --png build/scavenging/plot.png

hundred-million: .venv/.stamp-test ## 103 M parameters in two regions, killed twice; needs 14 GB of memory; goes on where it stopped
	nice -n 10 $(BIN)/python -m tests.verify.results.hundred_million --out build/hundred-million --json build/hundred-million/result.json --png build/hundred-million/plot.png

quality: .venv/.stamp-test       ## held-out loss of every way to synchronise; hours, goes on where it stopped
	nice -n 5 $(BIN)/diloco bench quality --file build/quality.jsonl --plot build/quality.png

site: .venv/.stamp-site          ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build   # Not --quiet: a link that leads nowhere would be no error.
	@echo "open build/site/index.html"

.venv/.stamp-site: .venv/.stamp
	@$(PIP) -e '.[site]'
	@touch $@

docs: .venv/.stamp-test          ## the generated reference pages
	$(BIN)/python -m tests.reference_pages docs/reference

clean:
	rm -rf .venv build dist *.egg-info
