# Two commands: `make demo` prints text from the bundled model, `make test` runs every test. Both install what they
# need first. Without make: `python3.11 tools/dev demo`. FORCE=1 runs steps that are up to date too.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
COMMANDS := demo test setup lint sanitize stubs wheel clean

.DEFAULT_GOAL := help
.PHONY: help $(COMMANDS)

help:
	@echo "make demo      text from the bundled model, with tokens per second"
	@echo "make test      every test: C++, Python, types, lint, packaging, sanitizers, CUDA compile"
	@echo "make setup     install and build only"
	@echo "make lint      format, types, lint scripts, stubs"
	@echo "make sanitize  C++ tests under ASan, UBSan and TSan"
	@echo "make stubs     write the stubs of the native module anew"
	@echo "make wheel     build a wheel into dist/"
	@echo "make clean     remove build/ and dist/"

$(COMMANDS):
	@$(PYTHON) tools/dev $@
