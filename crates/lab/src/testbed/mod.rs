//! Testbeds: network namespaces, processes and their placement on processors, servers under test,
//! and the load on them.

pub mod apps;
pub(crate) mod btf;
pub mod cleanup;
pub(crate) mod client;
pub mod cpu;
pub mod dns;
pub(crate) mod ending;
pub(crate) mod flood;
pub(crate) mod folder;
pub mod for_tests;
pub mod load;
pub mod netns;
pub(crate) mod perf;
pub mod plain_reader;
pub mod process;
pub(crate) mod programs;
pub mod raw_receiver;
pub(crate) mod receive_timer;
pub mod receive_work;
pub(crate) mod stop;
pub(crate) mod sys;
pub(crate) mod sysctl;
pub mod tcp;
pub mod test_case;
pub(crate) mod tracefs;
pub(crate) mod web_client;
