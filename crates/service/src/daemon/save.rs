//! A core as plain data, and back.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_engine::{Engine, Inherited};
use tidegate_memory::shared::Region;
use tidegate_port::Left;
use tidegate_port::xdp::Link;
use tidegate_stack::{SavedStack, TcpId};

use super::application::Application;
use super::calls::Host;
use super::claims::{Numbered, Taken};
use super::names::{AppNumber, Owner, SocketKey};
use super::owners::Sockets;
#[cfg(doc)]
use super::passages::Passages;
use super::quota::Terms;
use super::socket::Socket;
use super::state::{Damaged, SavedClaim, SavedPassage, SavedPort, State};
use crate::contract::layout::{Geometry, Memory};

/// The descriptors that belong to a [`State`].
#[derive(Default)]
pub(super) struct Belongings {
    memories: Vec<Memory>,
    connections: Vec<Arc<OwnedFd>>,
    /// What is held of the kernel, and what is left of the port.
    kernel: Vec<OwnedFd>,
}

/// Descriptors of each memory.
const MEMORY_FDS: usize = 2;

impl Belongings {
    /// All of them, in the order in which [`restore`] takes them.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let memories = self.memories.iter().flat_map(Memory::regions).map(AsFd::as_fd);
        let connections = self.connections.iter().map(AsFd::as_fd);
        memories.chain(connections).chain(self.kernel.iter().map(AsFd::as_fd)).collect()
    }

    /// The number of a memory, which is added if it is new.
    fn number(&mut self, memory: &Memory) -> u32 {
        let known = self.memories.iter().position(|known| known.is_same(memory));
        let number = known.unwrap_or_else(|| {
            self.memories.push(memory.clone());
            self.memories.len() - 1
        });
        number as u32
    }
}

/// Writes down all that applications have.
///
/// # Errors
/// When the process has no descriptor left.
pub(super) fn save(
    stack: SavedStack,
    host: &mut Host,
    apps: &mut [Option<Box<Application>>],
) -> io::Result<(State, Belongings)> {
    let mut belongings = Belongings::default();
    let applications = apps
        .iter_mut()
        .map(|app| {
            let app = app.as_deref_mut()?;
            // Every application has a memory of its own.
            belongings.memories.push(app.memory.clone());
            belongings.connections.push(app.connection());
            Some(app.save(belongings.memories.len() as u32 - 1))
        })
        .collect();
    let Host { engine, claims: own, sockets, passages, .. } = host;
    let passages = passages.save();
    let mut claims = Numbered::default();
    // Those among cores come again with the sockets.
    let is_shared = own.is_shared();
    let ending = own.ending().filter(|_| is_shared);
    let ending = ending.map(|(id, claim)| (id.to_bits(), claims.number(claim))).collect();
    let sockets = sockets
        .all()
        .map(|socket| {
            let socket = socket?;
            // That of an application that has ended is there as long as the socket.
            let memory = belongings.number(socket.place.memory());
            let claim = socket.claim.as_ref().filter(|_| is_shared);
            Some(socket.save(memory, claim.map(|claim| claims.number(claim)), engine))
        })
        .collect();
    let memories = belongings.memories.iter().map(|memory| *memory.geometry()).collect();
    let (claims, held): (_, Vec<_>) = claims.save()?.into_iter().unzip();
    belongings.kernel.extend(held.into_iter().flatten());
    let port = match left(engine) {
        Some((port, fd)) => {
            belongings.kernel.push(fd.try_clone_to_owned()?);
            Some(port)
        }
        None => None,
    };
    let mac = engine.stack().mac().0;
    let state =
        State { stack, mac, memories, applications, sockets, passages, claims, ending, port };
    Ok((state, belongings))
}

/// What the next daemon's port needs of this one's.
fn left(engine: &Engine) -> Option<(SavedPort, BorrowedFd<'_>)> {
    match engine.left()? {
        Left::Xdp(loaded) => {
            let link = loaded.link()?;
            Some((SavedPort::Link { native: link.native() }, link.as_fd()))
        }
        Left::Tap(device) => Some((SavedPort::Tap, device.as_fd())),
    }
}

/// What a core has besides its engine.
pub(super) struct Restored {
    pub(super) apps: Vec<Option<Box<Application>>>,
    pub(super) sockets: Sockets,
    pub(super) passages: Vec<SavedPassage>,
    pub(super) taken: Taken,
}

/// Makes everything again of what another daemon has saved. Also gives its stack,
/// and what is left of its port.
///
/// # Errors
/// [`Damaged`], and what the kernel says of the memory.
pub(super) fn restore(
    state: State,
    descriptors: Vec<OwnedFd>,
    terms: Terms,
) -> io::Result<(SavedStack, Restored, Option<Inherited>)> {
    let State { stack, memories, applications, sockets, passages, claims, ending, port, .. } =
        state;
    let held = claims.iter().filter(|claim| claim.is_held).count();
    let count = memories.len() * MEMORY_FDS
        + applications.iter().flatten().count()
        + held
        + usize::from(port.is_some());
    if descriptors.len() != count {
        return Err(Damaged("there are not as many descriptors as it says").into());
    }
    let mut descriptors = descriptors.into_iter();
    let memories: Vec<Memory> =
        memories.into_iter().map(|of| map(of, &mut descriptors)).collect::<io::Result<_>>()?;
    let memory = |number: u32| memories.get(number as usize).ok_or(Damaged("no such memory"));
    let apps: Vec<_> = applications
        .into_iter()
        .map(|saved| {
            let Some(saved) = saved else { return Ok(None) };
            let connection = descriptors.next().ok_or(Damaged("a connection is missing"))?;
            let memory = memory(saved.memory)?.clone();
            let app = Application::restore(saved, memory, connection, terms)?;
            Ok(Some(Box::new(app)))
        })
        .collect::<io::Result<_>>()?;
    let with_claims = (0..).zip(&sockets);
    let with_claims = with_claims.filter_map(|(key, saved)| Some((key, saved.as_ref()?.claim?)));
    let with_claims: Vec<_> = with_claims.collect();
    let sockets: Vec<_> = sockets
        .into_iter()
        .map(|saved| {
            let Some(saved) = saved else { return Ok(None) };
            let memory = memory(saved.memory)?;
            Socket::restore(saved, memory).map(Some)
        })
        .collect::<io::Result<_>>()?;
    let on_their_way = passages.iter().filter(|passage| passage.count > 0).count();
    check(&apps, &sockets, on_their_way)?;
    let mut held = |claim: &SavedClaim| if claim.is_held { descriptors.next() } else { None };
    let claims = claims.into_iter().map(|claim| (held(&claim), claim)).collect();
    let ending = ending.into_iter().map(|(id, claim)| (TcpId::from_bits(id), claim)).collect();
    let taken = Taken::new(claims, with_claims, ending)?;
    let inherited = port.and_then(|port| {
        let fd = descriptors.next()?;
        Some(match port {
            SavedPort::Link { native } => Inherited::Link(Link::inherited(fd, native)),
            SavedPort::Tap => Inherited::Tap(fd),
        })
    });
    let restored = Restored { apps, sockets: Sockets::restore(sockets), passages, taken };
    Ok((stack, restored, inherited))
}

fn map(geometry: Geometry, descriptors: &mut impl Iterator<Item = OwnedFd>) -> io::Result<Memory> {
    if !geometry.is_sound() {
        return Err(Damaged("memory of a size that makes no sense").into());
    }
    let mut region = |words| {
        let fd = descriptors.next().ok_or(Damaged("a memory is missing"))?;
        Region::open(fd, words)
    };
    let (control, data) = (region(geometry.control_words())?, region(geometry.data_words())?);
    Memory::new(geometry, control, data)
}

/// Who has a socket is written down twice: with him and with it. So is that it is on
/// its way, which [`Passages::restore`] looks at more closely.
fn check(
    apps: &[Option<Box<Application>>],
    sockets: &[Option<Socket>],
    on_their_way: usize,
) -> Result<(), Damaged> {
    let mut had = on_their_way;
    for (number, app) in apps.iter().enumerate() {
        for (handle, key) in app.iter().flat_map(|app| app.sockets()) {
            had += 1;
            let holder = Owner { app: number as AppNumber, place: handle.place };
            let socket = sockets.get(key as usize).and_then(Option::as_ref);
            let holds = |socket: &Socket| socket.holders.contains(&holder);
            if !socket.is_some_and(holds) {
                return Err(Damaged("an application has a socket that is not its own"));
            }
        }
    }
    let held: usize = sockets.iter().flatten().map(|socket| socket.holders.len()).sum();
    if held != had || sockets.len() > SocketKey::MAX as usize {
        return Err(Damaged("a socket has an application that knows nothing of it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};
    use tidegate_stack::{Config, Stack};
    use tidegate_wire::MacAddr;

    use super::*;
    use crate::contract::command::{COMMAND_WORDS, Command, Handle};
    use crate::contract::status::{Phase, Status};
    use crate::daemon::fuzz;
    use crate::daemon::names::{Identity, Moved};
    use crate::daemon::passages::{ON_ITS_WAY, Passage, Passages, Shown};
    use crate::daemon::state::{
        SavedApplication, SavedDatagram, SavedEntry, SavedKind, SavedProtocol, SavedSocket,
    };

    const GEOMETRY: Geometry = Geometry { sockets: 4, tcp_bytes: 4096, udp_bytes: 4096 };

    /// One application with a socket of each kind.
    fn state() -> State {
        let arena = ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false };
        let arena = Arena::new(arena).unwrap();
        let config = Config {
            addresses: vec!["192.0.2.1/24".parse().unwrap()],
            ..Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), [7; 16])
        };
        let stack = Stack::new(config, 0).unwrap().save(0, &arena);
        let handle = |place| Handle { place, generation: 1 };
        let held = SavedDatagram {
            remote: "192.0.2.2:53".parse().unwrap(),
            local: "192.0.2.1".parse().unwrap(),
            bytes: vec![7; 20],
        };
        let moved = Moved { to_app: 1, from_app: 2 };
        let kinds = [
            SavedKind::Datagrams { id: 1, held: Some(held), moved },
            SavedKind::Listener { id: 1 << 32 },
            SavedKind::Stream { id: 3, is_shut: false, is_closed: true, moved },
        ];
        let phase = Status { phase: Phase::Connected, ..Status::default() };
        let socket = |(place, kind)| {
            let place = place as u32;
            Some(SavedSocket {
                handle: handle(place),
                kind,
                memory: 0,
                status: phase.to_word(),
                origin: Owner { app: 0, place },
                holders: match place {
                    1 => vec![Owner { app: 0, place }, ON_ITS_WAY],
                    _ => vec![Owner { app: 0, place }],
                },
                is_broken: false,
                claim: (place == 1).then_some(0),
            })
        };
        let entry = |place| SavedEntry { handle: handle(place), key: place, waits_to_tell: false };
        let application = SavedApplication {
            identity: Identity { pid: 1, uid: 2, name: "test".to_owned() },
            ticket: [9; 16],
            memory: 0,
            entries: (0..3).map(entry).collect(),
            generations: vec![1; 3],
            free: vec![3],
            untold: vec![[1, 0, 0, 0, 0, 0, 0, 0]],
            held_back: Some(Command::Close { socket: handle(2), abrupt: true }.to_words()),
            commands_taken: 5,
            moved,
        };
        State {
            stack,
            mac: [2, 0, 0, 0, 0, 1],
            memories: vec![GEOMETRY],
            applications: vec![Some(application), None],
            sockets: kinds.into_iter().enumerate().map(socket).collect(),
            passages: vec![SavedPassage {
                shown: Shown { cookie: 7, part: 1 },
                key: 1,
                uid: 2,
                count: 1,
                is_shared: false,
                parts: 2,
            }],
            claims: vec![SavedClaim {
                protocol: SavedProtocol::Tcp,
                local: "192.0.2.1:80".parse().unwrap(),
                addresses: vec!["192.0.2.1".parse().unwrap()],
                is_held: true,
            }],
            ending: vec![(9, 0)],
            port: Some(SavedPort::Link { native: true }),
        }
    }

    struct Kit {
        regions: [Region; 2],
        connection: UnixStream,
    }

    impl Kit {
        fn new() -> Self {
            let region = |words| Region::reserve(words).unwrap();
            let regions = [region(GEOMETRY.control_words()), region(GEOMETRY.data_words())];
            Self { regions, connection: UnixStream::pair().unwrap().0 }
        }

        fn restore(&self, state: State) -> io::Result<Restored> {
            // For what is held of the kernel any descriptor is as good.
            let others = [self.connection.as_fd(); 3];
            let fds = self.regions.iter().map(AsFd::as_fd).chain(others);
            let fds = fds.map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            restore(state, fds, Terms::default()).map(|(_, restored, _)| restored)
        }
    }

    #[test]
    fn what_is_written_down_comes_back() {
        let kit = Kit::new();
        let state = state();
        let bytes = state.encode().unwrap();
        let read = State::decode(&bytes).unwrap();
        assert_eq!(read.encode().unwrap(), bytes);
        let mut restored = kit.restore(read).unwrap();
        let app = restored.apps[0].as_mut().unwrap();
        assert_eq!(app.sockets().count(), 3);
        assert_eq!(app.reserve().unwrap(), Handle { place: 3, generation: 1 });
        assert!(!app.has_room());
        assert_eq!(restored.sockets.keys(), [0, 1, 2]);
        let again = |change: fn(&mut SavedPassage), fits: fn(&Passage) -> bool| {
            let mut saved = restored.passages.clone();
            change(&mut saved[0]);
            Passages::restore(saved, 5, fits)
        };
        let passages = again(|_| (), |passage| passage.key == 1).unwrap();
        assert_eq!(passages.next_ns(), Some(60_000_000_005));
        assert!(again(|_| (), |_| false).is_err());
        assert!(again(|saved| saved.count = 0, |_| true).is_err(), "nobody can take it");
        let shared = again(|saved| (saved.count, saved.is_shared) = (0, true), |_| true).unwrap();
        assert_eq!((shared.next_ns(), shared.key(Shown { cookie: 7, part: 1 })), (None, Some(1)));
        assert!(restored.sockets.get(2).unwrap().is_closed());
        assert!(State::decode(&bytes[..bytes.len() - 1]).is_err(), "cut off");
        assert!(State::decode(&[&bytes[..], &[0]].concat()).is_err(), "too long");
        assert!(State::decode(b"tidestt\x01").is_err(), "another version");
    }

    #[test]
    fn a_state_that_contradicts_itself_is_refused() {
        let kit = Kit::new();
        let refused = |change: fn(&mut State)| {
            let mut state = state();
            change(&mut state);
            kit.restore(state).map(|_| ()).unwrap_err().to_string()
        };
        fn app(state: &mut State) -> &mut SavedApplication {
            state.applications[0].as_mut().unwrap()
        }
        fn socket(state: &mut State) -> &mut SavedSocket {
            state.sockets[0].as_mut().unwrap()
        }
        let lies: [fn(&mut State); 20] = [
            |state| state.memories.clear(),
            |state| state.memories[0].tcp_bytes = 5,
            |state| state.memories[0].sockets = 1 << 19,
            |state| state.applications.push(state.applications[0].clone()),
            |state| app(state).memory = 1,
            |state| app(state).generations = vec![1; 5],
            |state| app(state).free = vec![4],
            |state| app(state).entries[0].handle.place = 7,
            |state| app(state).entries[1].handle.place = 0,
            |state| app(state).entries[0].key = 9,
            |state| app(state).untold[0] = [99; 8],
            |state| socket(state).memory = u32::MAX,
            |state| socket(state).holders.push(Owner { app: 1, place: 0 }),
            |state| socket(state).handle.place = 4,
            |state| state.passages.clear(),
            |state| app(state).held_back = Some([99; COMMAND_WORDS]),
            |state| socket(state).claim = Some(1),
            |state| state.ending[0].1 = u32::MAX,
            |state| state.claims[0].is_held = false,
            |state| state.port = None,
        ];
        for (number, lie) in lies.into_iter().enumerate() {
            assert!(!refused(lie).is_empty(), "{number}");
        }
    }

    #[test]
    fn no_damage_does_any() {
        let bytes = state().encode().unwrap();
        let mut reached = BTreeSet::new();
        for at in 0..bytes.len() {
            for flip in [1, 0x40, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                reached.insert(fuzz::check(&damaged));
            }
        }
        assert_eq!(reached.len(), 3, "{reached:?}");
    }

    fn corpus() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/daemon_state")
    }

    /// Each seed says by its name what becomes of it.
    #[test]
    fn corpus_of_daemon_state() {
        let mut reached = BTreeSet::new();
        for entry in std::fs::read_dir(corpus()).expect("the corpus is in the repository") {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let expected = match name.split('_').next() {
                Some("good") => fuzz::Outcome::TakenUp,
                Some("refused") => fuzz::Outcome::Refused,
                _ => fuzz::Outcome::Unreadable,
            };
            let outcome = fuzz::check(&std::fs::read(path).unwrap());
            assert_eq!(outcome, expected, "{name}: is the format new?");
            reached.insert(outcome);
        }
        assert_eq!(reached.len(), 3, "{reached:?}");
    }

    /// `TIDEGATE_GOLDEN=write cargo test -p tidegate-service` makes them anew after a
    /// change of the format.
    #[test]
    fn the_seeds_of_daemon_state_are_of_this_format() {
        let mut alone = state();
        (alone.memories, alone.applications, alone.sockets) = Default::default();
        alone.passages.clear();
        (alone.claims, alone.ending, alone.port) = Default::default();
        let mut lies = state();
        lies.applications[0].as_mut().unwrap().entries[0].key = 9;
        let whole = state().encode().unwrap();
        let may_write = std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write");
        for (name, bytes) in [
            ("good_one_application", whole.clone()),
            ("good_nobody", alone.encode().unwrap()),
            ("refused_another_s_socket", lies.encode().unwrap()),
            ("unreadable_cut", whole[..whole.len() / 2].to_vec()),
        ] {
            let path = corpus().join(name);
            if may_write {
                std::fs::write(&path, &bytes).unwrap();
            }
            assert!(std::fs::read(path).unwrap() == bytes, "{name}: the format has changed");
        }
    }
}
