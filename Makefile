# mlua: `make` builds build/mlua, `make demo` trains a small GPT, `make test` runs the quick tests.
#
#   make demo            train models/gpt.lua on the default corpus, then print a sample (under 2 minutes)
#   make test [T=name]   the quick tests, or those whose name contains T
#   make test-all        all of them, also those that tests/slow.list lists
#   make test-asan       all under AddressSanitizer and UndefinedBehaviorSanitizer
#   make core            link graph, passes, shard, plan, exec and lowering alone and with ops, and test them
#   make test-long       what takes hours: the tests named long/...
#   make test-dist       every layout of every model on CPU ranks
#   make reach           host code that no test reaches under sanitizers, though tests/plain.list's do
#   make test-emulated   the GPU tests on an emulated GPU (slow; needs the CUDA toolkit's headers)
#   make test-gpu-dist   every layout on the GPUs of this machine, and how fast they are together
#   make test-gpu        kernels, parity and examples on the GPU of this machine
#   make bench           CPU benchmarks as JSON lines
#   make bench-gpu       the same on a GPU
#   make lint            layering, length and formatting
#   make editor          write editor/mlua.lua, completion for editors, from the program's tables
#   make install PREFIX=/usr/local
# V=1 prints the commands; PEERS=DIR has make bench run the PyTorch peer of that folder (torch_cpu.py) beside mlua.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

B ?= build
CC ?= cc
PREFIX ?= /usr/local
CUDA_HOME ?= /usr/local/cuda
OPT ?= -O2
SANITIZE ?=
V ?=
Q := $(if $(V),,@)

# Kernel texts are raw strings, which C has as GCC's extension; kernels themselves compile with both.
ifneq ($(findstring clang,$(shell $(CC) --version 2>/dev/null)),)
$(error mlua builds with gcc: make CC=gcc. Only kernels may go to clang: CC=clang $(B)/mlua run ...)
endif

# Plain x86-64-v2, so that the binary runs on other machines; kernels compiled at run time use all
# that the processor has.
ARCH := $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v2)
CUDA := $(if $(wildcard $(CUDA_HOME)/include/cuda.h),-DMLUA_CUDA -isystem $(CUDA_HOME)/include)
# Of optimized code lines alone: variables are seldom there, and their description takes a fifth of the build.
DEBUG := $(if $(filter -O0,$(OPT)),-g,-g1)
CFLAGS := -std=gnu11 $(OPT) $(DEBUG) $(ARCH) -Wall -Wextra -Werror=switch -Wno-missing-field-initializers -fno-strict-aliasing \
          -I. -I$(B) -isystem /usr/include/lua5.4 $(CUDA) $(SANITIZE)
STATIC := lua5.4 edit tinfo bsd md jansson xxhash zstd z pcre2-8 utf8proc
LDLIBS := $(STATIC:%=-l:lib%.a) -lm -ldl -lpthread
LDFLAGS := -rdynamic $(SANITIZE)

SOURCES := $(wildcard runtime/*.c runtime/*/*.c runtime/*/*/*.c codegen/*/*.c vm/*/*.c)
OBJECTS := $(SOURCES:%.c=$(B)/%.o) $(B)/embed.o
LIBRARY := $(filter-out $(B)/vm/cli/main.o,$(OBJECTS))
TESTS := $(filter-out tests/emulator/% tests/core/% tests/reach/%,$(wildcard tests/*.c tests/*/*.c))
# The core: script graphs to plans, the interpreter, and programs that run, without families of ops, optimizations, pipelines,
# ranks, devices and kernel files. It links alone (test-core-alone, with a device of its own); its other tests (test-core) have
# families of ops and optimizations too, and run nothing.
CORE := $(filter-out runtime/compile_list.c,$(wildcard runtime/*.c $(addsuffix /*.c,$(addprefix runtime/,base graph passes shard plan)) codegen/emit/*.c)) \
        $(filter-out %/routines.c %/recurrence.c %/loop.c,$(wildcard codegen/lower/*.c))
CORE_EXEC := $(filter-out %/beside_core.c,$(wildcard runtime/exec/*.c))
CORE_ALONE := tests/test.c $(wildcard tests/core/*.c tests/core/alone/*.c)
CORE_OPS := runtime/compile_list.c $(wildcard runtime/ops/*.c runtime/ops/*/*.c runtime/optimize/*.c) $(addprefix codegen/lower/,routines.c recurrence.c loop.c)
CORE_TESTS := tests/test.c $(wildcard tests/core/*.c tests/graph/*.c) tests/optimize/batch_kernels.c tests/plan/fit_memory.c \
              $(filter-out %/golden.c %/every.c %/kernels.c %/attention.c,$(wildcard tests/passes/*.c tests/shard/*.c))
LUA := $(wildcard stdlib/*.lua)
MODELS := $(sort $(wildcard models/*.lua))
# Sources of kernels: inside the binary, compiled when a model is.
PRELUDES := codegen/kernels/c/prelude.h codegen/kernels/cuda/prelude.cuh
KERNELS := $(sort $(wildcard codegen/kernels/cuda/*.cu codegen/kernels/cuda/*.cuh codegen/kernels/c/*.c codegen/kernels/c/*.h))
# The default corpus: the text that this repository itself holds.
TEXT := $(sort $(wildcard README.md */*.md */*/*.md) $(LUA) $(wildcard models/*.lua) $(SOURCES) $(KERNELS) \
        $(wildcard runtime/*.h runtime/*/*.h runtime/*/*/*.h codegen/*.h codegen/*/*.h vm/*.h vm/*/*.h tests/*.c tests/*/*.c))

.PHONY: all demo test test-all core test-dist test-long test-asan test-emulated reach test-gpu test-gpu-dist bench bench-gpu lint editor install clean deps
all: $(B)/mlua

# ---- Packages -------------------------------------------------------------------------------------
PACKAGES := gcc make liblua5.4-dev libedit-dev libjansson-dev libmd-dev libxxhash-dev libzstd-dev zlib1g-dev \
            libpcre2-dev libutf8proc-dev libopenblas0-pthread libmicrohttpd-dev
NEEDED := $(foreach h,lua5.4/lua.h histedit.h jansson.h sha2.h xxhash.h zstd.h zlib.h pcre2.h utf8proc.h,$(if $(wildcard /usr/include/$(h)),,$(h)))
BLAS := $(firstword $(wildcard /usr/lib/*/libopenblas.so.0 /usr/lib/*/openblas*/libopenblas.so.0 /usr/lib64/libopenblas*.so.0))
deps:
ifneq ($(strip $(NEEDED))$(if $(BLAS),,x),)
	@if command -v apt-get >/dev/null; then \
	   sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	   echo "installing $(PACKAGES)"; \
	   $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; \
	 else \
	   echo "mlua needs (Debian's names): $(PACKAGES)"; \
	   echo "install what your distribution calls them, static libraries included, then run make again"; exit 1; \
	 fi
endif

# ---- The program ----------------------------------------------------------------------------------
$(B)/%.o: %.c | deps
	@mkdir -p $(@D)
	@$(if $(V),,echo "  cc    $<")
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/corpus.txt: $(TEXT)
	@mkdir -p $(B)
	@cat $(TEXT) > $@
# Files inside the binary: $(1) is the table's name, $(2) the files, $(3) what of a file's path is its name.
# Texts end in a 0 byte.
define embed
{ echo '.section .rodata'; i=0; \
   for f in $(2); do i=$$((i+1)); \
     echo ".Lname_$(1)$$i: .string \"$(3)\""; echo ".Ldata_$(1)$$i: .incbin \"$$f\""; \
     echo ".Lend_$(1)$$i: .byte 0"; done; \
   echo '.section .data.rel.ro,"aw"'; echo '.balign 8'; echo '.globl $(1)'; echo '$(1):'; \
   for j in $$(seq 1 $$i); do echo ".quad .Lname_$(1)$$j, .Ldata_$(1)$$j, .Lend_$(1)$$j-.Ldata_$(1)$$j"; done; \
   echo '.quad 0, 0, 0'; }
endef
# stdlib/ and the corpus (vm/embed.h), and the sources of kernels (codegen/kernel_files.h)
$(B)/embed.s: $(LUA) $(MODELS) $(KERNELS) $(B)/corpus.txt vm/show/report.html Makefile
	@mkdir -p $(B)/text
	@for f in $(PRELUDES); do \
	   sed -e '/^#include .*functions\.h"/{r codegen/kernels/c/functions.h' -e 'd}' $$f > $(B)/text/$${f##*/}; done
	@{ $(call embed,ml_embedded_files,$(LUA) vm/show/report.html $(B)/corpus.txt,$${f##*/}); \
	   $(call embed,ml_model_files,$(MODELS),$$f); \
	   $(call embed,ml_kernel_files,$(filter-out $(PRELUDES),$(KERNELS)) $(addprefix $(B)/text/,$(notdir $(PRELUDES))),$$f); echo '.section .note.GNU-stack,"",@progbits'; } > $@
$(B)/embed.o: $(B)/embed.s
	$(Q)$(CC) -c -o $@ $<

$(B)/mlua: $(OBJECTS)
	@$(if $(V),,echo "  link  $@")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/test: $(LIBRARY) $(TESTS:%.c=$(B)/%.o)
	@$(if $(V),,echo "  link  $@")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/test-core: $(CORE:%.c=$(B)/%.o) $(CORE_OPS:%.c=$(B)/%.o) $(CORE_TESTS:%.c=$(B)/%.o)
	@$(if $(V),,echo "  link  $@")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/test-core-alone: $(CORE:%.c=$(B)/%.o) $(CORE_EXEC:%.c=$(B)/%.o) $(CORE_ALONE:%.c=$(B)/%.o)
	@$(if $(V),,echo "  link  $@")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
-include $(shell find $(B) -path '$(B)/kernels' -prune -o -name '*.d' -type f -print 2>/dev/null)

install: $(B)/mlua
	install -Dm755 $(B)/mlua $(DESTDIR)$(PREFIX)/bin/mlua
	install -d $(DESTDIR)$(PREFIX)/share/mlua
	$(B)/mlua editor $(DESTDIR)$(PREFIX)/share/mlua/mlua.lua

# ---- Running --------------------------------------------------------------------------------------
demo: $(B)/mlua
	$(B)/mlua run models/gpt.lua preset=demo

T ?=
# More options of build/test: --but-plain, --plain.
TEST_OPTIONS ?=
# The tests keep their kernels in a cache of their own; -v tells each test's time.
CACHE ?= $(abspath $(B))/kernels
test: $(B)/mlua $(B)/test
	MLUA_CACHE=$(CACHE) MLUA=$(B)/mlua $(B)/test $(if $(CI),--again) $(T)
test-all: $(B)/mlua $(B)/test
	MLUA_CACHE=$(CACHE) MLUA=$(B)/mlua $(B)/test --all $(TEST_OPTIONS) $(if $(CI),--again) $(T)
# Every layout of every model on CPU ranks (minutes).
test-dist: $(B)/mlua $(B)/test
	DIST_ALL=1 MLUA_CACHE=$(CACHE) MLUA=$(B)/mlua $(B)/test -v dist/
# The core alone, linked without the rest, and its tests.
core: $(B)/test-core-alone $(B)/test-core
	$(B)/test-core-alone
	$(B)/test-core
# The tests of area long (hours): whole matrices of what `make test` samples.
test-long: $(B)/mlua $(B)/test
	LONG=1 MLUA_CACHE=$(CACHE) MLUA=$(B)/mlua $(B)/test -v $(or $(T),long/)
# Not position-independent: descriptions of the sanitizers need no relocation when a command starts, which halves that.
test-asan:
	@$(MAKE) --no-print-directory B=$(B)/asan CACHE=$(CACHE) OPT=-Og \
	  SANITIZE="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -no-pie" test-all
# Basic blocks that CI's run under sanitizers does not reach, though tests of tests/plain.list do (minutes; python3, binutils).
reach:
	@mkdir -p $(B)/reach/reached
	@$(CC) -O2 -c -o $(B)/reach/blocks.o tests/reach/blocks.c
	@$(MAKE) --no-print-directory B=$(B)/reach CUDA_HOME=/none OPT=-Og SANITIZE=-fsanitize-coverage=trace-pc \
	  LDFLAGS="-rdynamic $(B)/reach/blocks.o" $(B)/reach/mlua $(B)/reach/test
	MLUA_REACH=$(abspath $(B))/reach/reached MLUA_CACHE=$(CACHE) MLUA=$(B)/reach/mlua $(B)/reach/test --all $(T) || true
	python3 tests/reach/compare.py $(B)/reach/reached $(B)/reach/mlua $(B)/reach/test
test-gpu: $(B)/mlua $(B)/test
	MLUA=$(B)/mlua $(B)/test --gpu $(T)
test-gpu-dist: $(B)/mlua $(B)/test
	B=$(B) MLUA=$(B)/mlua tests/gpu_dist.sh
test-emulated: $(B)/mlua $(B)/test
	B=$(B) MLUA=$(B)/mlua tests/emulator/run.sh $(B)/test --gpu $(T)

bench: $(B)/mlua
	MLUA=$(B)/mlua tests/bench.sh cpu
bench-gpu: $(B)/mlua
	MLUA=$(B)/mlua tests/bench.sh gpu

editor: $(B)/mlua
	$(B)/mlua editor editor/mlua.lua
lint:
	@tests/lint.sh

clean:
	rm -rf $(B)
