# How BPF programs are built: $(OBJECTS), which are checked in, so that a build of
# Tidegate needs no clang. `make check` proves that they are what the sources say.
#
# The bytes depend on the compiler's version: use clang 14 of Debian 12.

CLANG ?= clang-14
STRIP ?= llvm-strip-14

FLAGS += -target bpfel -mcpu=v2 -O2 -g -std=gnu11 -Wall -Wextra -Werror \
	-fdebug-compilation-dir=.

.PHONY: all check
all: $(OBJECTS)

%.bpf.o: %.bpf.c $(HEADERS)
	$(CLANG) $(FLAGS) -c $< -o $@
	$(STRIP) -g $@

check:
	@work=$$(mktemp -d); status=0; \
	for object in $(OBJECTS); do \
		$(CLANG) $(FLAGS) -c $${object%.o}.c -o $$work/$$object && \
		$(STRIP) -g $$work/$$object && \
		cmp $$work/$$object $$object || status=1; \
	done; \
	rm -r $$work; exit $$status
