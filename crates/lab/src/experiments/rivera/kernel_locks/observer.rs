//! Observation of the locks of a kernel UDP socket without a hook in the kernel's functions.
//!
//! A timer of each processor looks whether the locks are held: the share of looks that find a lock
//! held is the share of time for which it is held. Breakpoints stop every processor that writes to a
//! lock, and count the releases. The timer slows the readers little, the breakpoints much.

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray};
use aya::programs::perf_event::{
    BreakpointConfig, PerfBreakpointLength, PerfBreakpointType, PerfEventConfig, PerfEventLinkId,
    PerfEventScope, SamplePolicy, SoftwareEvent,
};
use aya::programs::{PerfEvent, RawTracePoint};

use crate::LabError;
use crate::testbed::load::take_array;

/// Built from `bpf/locks.bpf.c` by `make bpf`.
static BPF_OBJECT: &[u8] = aya::include_bytes_aligned!("../../../../bpf/locks.bpf.o");
/// Locks that can be observed at a time: a processor has four breakpoints.
const MAX_LOCKS: usize = 4;
/// Time between two looks of a processor's timer, in nanoseconds.
const SAMPLE_PERIOD_NS: u64 = 200_000;

/// Thread and addresses of locks, as the BPF program has them.
type TargetWords = [u64; 1 + MAX_LOCKS];
/// Socket, looks, looks that found each lock held, releases of each lock.
type ObservationWords = [u64; 2 + 2 * MAX_LOCKS];

/// Programs that observe locks.
pub(super) struct LockObserver {
    ebpf: Ebpf,
    targets: Array<MapData, TargetWords>,
    observations: PerCpuArray<MapData, ObservationWords>,
    processors: Vec<u32>,
}

/// Sums of the observations of all processors.
#[derive(Clone, Copy, Debug, Default)]
struct Observations {
    socket: u64,
    samples: u64,
    held: [u64; MAX_LOCKS],
    released: [u64; MAX_LOCKS],
}

impl LockObserver {
    /// Loads the programs. Reads files under `/sys` of the present namespace.
    pub(super) fn load() -> Result<Self, LabError> {
        let processors = aya::util::online_cpus()
            .map_err(|(path, source)| LabError::File { path: path.into(), source })?;
        let what = "cannot load the BPF programs that observe locks";
        let mut ebpf = Ebpf::load(BPF_OBJECT).map_err(LabError::io_other(what))?;
        for name in [SAMPLE_LOCKS, COUNT_RELEASES] {
            perf_program(&mut ebpf, name)?.load().map_err(LabError::io_other(what))?;
        }
        socket_program(&mut ebpf)?.load().map_err(LabError::io_other(what))?;
        let targets = take_array(&mut ebpf, "targets")?;
        let map = ebpf.take_map("observations").and_then(|map| map.try_into().ok());
        let observations = map.ok_or_else(|| missing("map `observations`"))?;
        Ok(Self { ebpf, targets, observations, processors })
    }

    /// Address of the socket on which the calling thread receives a datagram in `receive`.
    pub(super) fn find_socket(
        &mut self,
        receive: impl FnOnce() -> Result<(), LabError>,
    ) -> Result<u64, LabError> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        self.set_targets(thread.into(), &[])?;
        let program = socket_program(&mut self.ebpf)?;
        let failed = || LabError::io_other("cannot trace the receiving of a datagram");
        let link = program.attach("sock_recv_length").map_err(failed())?;
        let received = receive();
        program.detach(link).map_err(failed())?;
        received?;
        let address = self.observe()?.socket;
        let unknown = "the kernel's trace event sock_recv_length does not name the socket: run \
                       outside of a container";
        (address != 0).then_some(address).ok_or_else(|| LabError::Config(unknown.to_owned()))
    }

    /// Share of the time of `work` for which each lock was held, and the result of `work`.
    pub(super) fn held_shares<T>(
        &mut self,
        locks: &[u64],
        work: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<(Vec<f64>, T), LabError> {
        self.set_targets(0, locks)?;
        let clock = [PerfEventConfig::Software(SoftwareEvent::CpuClock)];
        let period = SamplePolicy::Period(SAMPLE_PERIOD_NS);
        let (seen, result) = self.run(SAMPLE_LOCKS, &clock, period, work)?;
        let share = |held: &u64| *held as f64 / seen.samples.max(1) as f64;
        Ok((seen.held.iter().take(locks.len()).map(share).collect(), result))
    }

    /// Releases of each lock during `work`, and the result of `work`.
    pub(super) fn releases<T>(
        &mut self,
        locks: &[u64],
        work: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<(Vec<u64>, T), LabError> {
        self.set_targets(0, locks)?;
        let breakpoint = |&address: &u64| {
            PerfEventConfig::Breakpoint(BreakpointConfig::Data {
                r#type: PerfBreakpointType::Write,
                address,
                // The byte that says that the lock is held.
                length: PerfBreakpointLength::Len1,
            })
        };
        let breakpoints: Vec<PerfEventConfig> = locks.iter().map(breakpoint).collect();
        let each = SamplePolicy::Period(1);
        let (seen, result) = self.run(COUNT_RELEASES, &breakpoints, each, work)?;
        Ok((seen.released[..locks.len()].to_vec(), result))
    }

    /// Does `work` while a program runs at these events of each processor.
    fn run<T>(
        &mut self,
        program: &str,
        events: &[PerfEventConfig],
        policy: SamplePolicy,
        work: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<(Observations, T), LabError> {
        let before = self.observe()?;
        let failed = || LabError::io_other("cannot attach a BPF program to the processors' events");
        let program = perf_program(&mut self.ebpf, program)?;
        let mut links: Vec<PerfEventLinkId> = Vec::new();
        for &cpu in &self.processors {
            for &event in events {
                let scope = PerfEventScope::AllProcessesOneCpu { cpu };
                links.push(program.attach(event, scope, policy, false).map_err(failed())?);
            }
        }
        let result = work();
        for link in links {
            program.detach(link).map_err(failed())?;
        }
        Ok((self.observe()?.since(&before), result?))
    }

    fn set_targets(&mut self, thread: u64, locks: &[u64]) -> Result<(), LabError> {
        let mut words: TargetWords = [0; 1 + MAX_LOCKS];
        words[0] = thread;
        for (word, lock) in words[1..].iter_mut().zip(locks) {
            *word = *lock;
        }
        let failed = LabError::io_other("cannot name the observed locks");
        self.targets.set(0, words, 0).map_err(failed)
    }

    fn observe(&self) -> Result<Observations, LabError> {
        let failed = LabError::io_other("cannot read what was observed of the locks");
        let values = self.observations.get(&0, 0).map_err(failed)?;
        Ok(values.iter().fold(Observations::default(), Observations::plus))
    }
}

const SAMPLE_LOCKS: &str = "sample_locks";
const COUNT_RELEASES: &str = "count_releases";

fn perf_program<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut PerfEvent, LabError> {
    let program = ebpf.program_mut(name).and_then(|program| program.try_into().ok());
    program.ok_or_else(|| missing(&format!("program `{name}`")))
}

fn socket_program(ebpf: &mut Ebpf) -> Result<&mut RawTracePoint, LabError> {
    let program = ebpf.program_mut("find_socket").and_then(|program| program.try_into().ok());
    program.ok_or_else(|| missing("program `find_socket`"))
}

fn missing(part: &str) -> LabError {
    LabError::Config(format!("the BPF object that observes locks has no {part}"))
}

impl Observations {
    fn plus(mut self, words: &ObservationWords) -> Self {
        // Only the processor that found the socket has its address.
        self.socket = self.socket.max(words[0]);
        self.samples += words[1];
        for lock in 0..MAX_LOCKS {
            self.held[lock] += words[2 + lock];
            self.released[lock] += words[2 + MAX_LOCKS + lock];
        }
        self
    }

    fn since(mut self, before: &Self) -> Self {
        self.samples -= before.samples;
        for lock in 0..MAX_LOCKS {
            self.held[lock] -= before.held[lock];
            self.released[lock] -= before.released[lock];
        }
        self
    }
}
