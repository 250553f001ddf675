//! Compiles the C shims between the dpdk and rdma devices and the inline functions of their libraries.

fn main() {
    println!("cargo::rerun-if-changed=dpdk");
    println!("cargo::rerun-if-changed=rdma");
    #[cfg(feature = "dpdk")]
    dpdk::build();
    #[cfg(feature = "rdma")]
    rdma::build();
}

#[cfg(feature = "rdma")]
mod rdma {
    pub fn build() {
        let mut shim = cc::Build::new();
        if let Err(error) = shim.file("rdma/endpoint.c").opt_level(3).try_compile("tidegate_rdma") {
            panic!(
                "feature `rdma` needs libibverbs 33 or newer: apt-get install libibverbs-dev\n{error}"
            );
        }
        println!("cargo::rustc-link-lib=dylib=ibverbs");
    }
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::process::Command;

    /// Libraries that the shim calls. They load drivers as plug-ins.
    const LIBRARIES: [&str; 4] = ["rte_ethdev", "rte_mempool", "rte_mbuf", "rte_eal"];

    pub fn build() {
        let mut shim = cc::Build::new();
        // DPDK's own flags: DPDK is compiled for a processor with SSE4, and its headers need its
        // configuration first.
        for flag in pkg_config("--cflags").split_whitespace() {
            shim.flag(flag);
        }
        let files = ["eal", "device", "burst", "card_memory", "handlers", "pool"];
        shim.files(files.map(|part| format!("dpdk/{part}.c")))
            .opt_level(3)
            // DPDK is loaded at program start, so the linker can place thread-local variables.
            .flag("-ftls-model=initial-exec")
            .compile("tidegate_dpdk");
        for directory in pkg_config("--libs-only-L").split_whitespace() {
            println!("cargo::rustc-link-search=native={}", directory.trim_start_matches("-L"));
        }
        for library in LIBRARIES {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
    }

    fn pkg_config(query: &str) -> String {
        let asked = Command::new("pkg-config").args([query, "libdpdk >= 22.11"]).output();
        match asked {
            Ok(output) if output.status.success() => {
                String::from_utf8_lossy(&output.stdout).into_owned()
            }
            Ok(output) => fail(&String::from_utf8_lossy(&output.stderr)),
            Err(error) => fail(&format!("pkg-config: {error}")),
        }
    }

    fn fail(why: &str) -> ! {
        panic!(
            "feature `dpdk` needs DPDK 22.11 or newer: apt-get install libdpdk-dev pkg-config\n{why}"
        )
    }
}
