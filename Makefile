# Tidegate. `make demo` shows it, `make test` proves it, `make build` builds it.

CARGO ?= cargo

# FEATURES=dpdk lints and tests with DPDK's drivers, and with RDMA.
FEATURES ?=
ifeq ($(FEATURES),dpdk)
WORKSPACE = --workspace --features tidegate-device/dpdk,tidegate-cli/dpdk,tidegate-lab/dpdk,tidegate-device/rdma
else
WORKSPACE = --workspace
endif

.PHONY: build test cost demo lint features dpdk bpf bpf-check loom miri tsan fuzz lab-dns programs report docs measure-all check-all install uninstall deb rpm package-test reproduce publish-check rdma-test clean

# Builds the program, target/release/tidegate, the library that `tidegate run` loads, the laboratory,
# target/release/tidegate-lab, and the C library, target/release/libtidegate.so and libtidegate.a.
build:
	@scripts/setup build
	$(CARGO) build --release --locked -p tidegate-cli -p tidegate-preload -p tidegate-lab -p tidegate-capi
	scripts/c-library link $${CARGO_TARGET_DIR:-target}/release

# Installs what `make build` has built, below PREFIX=/usr/local. DESTDIR, LIBDIR, SYSCONFDIR, UNITDIR,
# ZSHDIR and STRIP: scripts/install.
install:
	@scripts/install install

# Removes what `make install` with the same variables has installed.
uninstall:
	@scripts/install uninstall

# Makes Debian packages, in target/package, of a build of their own.
deb:
	@scripts/setup deb
	scripts/release-build
	scripts/packages deb

# Makes RPM packages, in target/package, of the same build.
rpm:
	@scripts/setup rpm
	scripts/release-build
	scripts/packages rpm

# Installs, uses, upgrades and removes the Debian packages in a Debian of their own, checks the RPM
# packages, and runs the container image.
package-test: deb rpm
	@scripts/setup package-test
	scripts/package-test

# Builds the Debian packages once more, in another folder, and compares all bytes.
reproduce: deb
	scripts/reproduce

# Demonstrates a DNS server on real packets, beside the same server on kernel sockets.
demo: build
	@scripts/setup demo
	target/release/tidegate demo

# Runs every test: units, packet scripts, devices and programs in network namespaces.
test: build
	@scripts/setup test $(FEATURES)
	$(CARGO) test $(WORKSPACE) --locked --no-fail-fast
	TIDEGATE_TEST_CORES=2 $(CARGO) test $(WORKSPACE) --locked --no-fail-fast \
		--test run_attached --test run_forking --test run_passing --test run_servers
	@if command -v valgrind >/dev/null; then $(MAKE) --no-print-directory cost; fi

# Most instructions that the echo of a UDP packet and a message on a TCP connection may cost on IPv4,
# and the ratio of that echo with its service time that is too much.
COST ?= 401 2650 1.01

# Checks these costs, and that a call through the C library costs at most 1.05 of those of the Rust
# call.
cost: build
	@scripts/setup cost
	scripts/cost $(COST)
	scripts/capi-cost 1.05

# Checks words, shape, format, lints, documentation, public API, licenses of dependencies, features
# and BPF objects, as CI does before the tests.
lint:
	@scripts/setup lint $(FEATURES)
	scripts/words
	scripts/shape
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(WORKSPACE) --all-targets --locked -- -D warnings
	$(CARGO) clippy --manifest-path suites/packetdrill/Cargo.toml --locked -- -D warnings
	$(CARGO) clippy --manifest-path crates/lab/peers/smoltcp/Cargo.toml --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked --quiet
	$(CARGO) test $(WORKSPACE) --locked --quiet --test public_api
	$(CARGO) deny --log-level error check bans licenses sources
	$(MAKE) --no-print-directory features
	$(MAKE) --no-print-directory bpf-check

# Checks the library without features and with each feature alone. Feature dpdk has a check of
# its own.
features:
	set -e; for feature in "" xdp packet attach tokio serde; do \
		$(CARGO) clippy --locked --quiet -p tidegate --features "$$feature" -- -D warnings; \
	done

# What lint and test with FEATURES=dpdk add, alone: tests of the devices, and tests of servers, of
# the router and of the laboratory on DPDK's drivers.
DPDK_FLAGS = --locked -p tidegate-device -p tidegate-cli -p tidegate-lab --features dpdk
dpdk:
	@scripts/setup dpdk
	$(CARGO) clippy $(DPDK_FLAGS) --all-targets -- -D warnings
	$(CARGO) test $(DPDK_FLAGS) --test dpdk --test dpdk_segmentation --test serve --test tcp \
		--test dns_tcp --test route --test upgrade
	$(CARGO) test $(DPDK_FLAGS) --lib --test experiments dpdk

# Serves unmodified programs over RDMA, between two emulated machines with Debian's kernel.
rdma-test:
	scripts/rdma-test target/rdma-test

# Builds the BPF objects from their C sources.
bpf:
	@scripts/setup lint
	$(MAKE) -C crates/device/bpf
	$(MAKE) -C crates/lab/bpf

# Checks that the checked-in BPF objects match their sources.
bpf-check:
	$(MAKE) -C crates/device/bpf check
	$(MAKE) -C crates/lab/bpf check

# Model-checks the rings and queues: every interleaving.
loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test --release --locked --lib -p tidegate-memory -p tidegate-queues --target-dir target/loom

# Checks the rings for undefined behaviour (needs a nightly toolchain with Miri).
miri:
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test --locked --lib -p tidegate-memory -- spsc shared
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test --locked --lib -p tidegate-queues

# Runs the receive queues under the thread sanitizer (needs a nightly toolchain with
# rust-src).
tsan:
	RUSTFLAGS=-Zsanitizer=thread $(CARGO) +nightly test --release -Zbuild-std \
		--target x86_64-unknown-linux-gnu --target-dir target/tsan --lib -p tidegate-queues

# Runs each fuzz target for two minutes (needs a nightly toolchain and cargo-fuzz).
fuzz:
	scripts/fuzz 120

# Compares with Knot DNS, NSD and kernel sockets.
lab-dns: build
	@scripts/setup lab
	target/release/tidegate lab dns

# Runs unmodified programs on the kernel, attached and embedded, in a quarter of an hour, and writes
# docs/programs.md. TIDEGATE_PROGRAMS=nginx,redis runs some.
programs:
	@scripts/setup programs
	$(CARGO) test --locked -p tidegate-cli --test program_table -- --ignored --nocapture

# Packs and builds each crate as a registry would, and publishes nothing.
publish-check:
	$(CARGO) publish --workspace --dry-run --locked

# Makes the documentation a book, target/book/html/index.html.
docs:
	@scripts/setup docs
	scripts/book

# Repeats the tables and figures of the five papers, in 100 minutes, and writes report.html and
# report.json. Results of the current commit are not measured again. A first look, in some 15 minutes:
# make report REPORT_FLAGS=--quick.
REPORT_FLAGS ?=
report: build
	@scripts/setup lab
	target/release/tidegate-lab report $(REPORT_FLAGS)

# Runs every experiment of docs/benchmarks.md and makes the page, in some hours. Results of the
# current commit are not measured again. A first look: scripts/measure-all --quick.
measure-all: build
	@scripts/setup lab
	scripts/measure-all

# Runs the checks that are too long for CI and records the results in docs/check-all.md.
check-all:
	scripts/check-all

clean:
	$(CARGO) clean
