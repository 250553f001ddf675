//! Migrations of a network core that a test runs step by step.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_device::mem::{MemConfig, wire};
use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::{Engine, NetConfig, ShardedStacks, open, open_sharded};
use tidegate_memory::shared::Region;
use tidegate_stack::{Limits, UdpOptions};

use crate::daemon::application::Application;
use crate::daemon::core::cores::Cores;
use crate::daemon::core::inbox::{Inbox, InboxSender};
use crate::daemon::core::load::FULL_PERMILLE;
use crate::daemon::core::message::{
    CoreMessage, LeavingApp, MigrationBatch, NotMigrated, PortQuery,
};
use crate::daemon::core::server::SocketServer;
use crate::daemon::core::{CoreSlot, NetworkCore};
use crate::daemon::ids::{AppNumber, Holder, Identity, StackSocketId};
use crate::daemon::quota::AppSettings;
use crate::daemon::socket::AppSocket;
use crate::daemon::workers::{AppFd, UserWorkers};
use crate::ipc::event_fds::EventFds;
use crate::ipc::layout::{Geometry, SharedMemory};
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::version::Library;

const CORES: usize = 3;

const GEOMETRY: Geometry = Geometry { sockets: 1024, tcp_bytes: 4096, udp_bytes: 4096 };

/// Own addresses, one of each family.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

/// One core with applications, and the engines and inboxes of the other cores.
struct CoreTestbed {
    core: NetworkCore,
    engines: Vec<Engine>,
    others: Vec<Inbox>,
    /// Other end of the device.
    client: Engine,
    workers: UserWorkers,
}

impl CoreTestbed {
    fn new(index: usize) -> Self {
        Self::with_limit(index, 1 << 20)
    }

    /// Testbed whose stacks have at most this many sockets.
    fn with_limit(index: usize, sockets: usize) -> Self {
        let (device, far) = wire(&MemConfig::default()).unwrap();
        let mut limits = Limits::default();
        limits.sockets = sockets;
        let net = NetConfig::new(device).limits(limits);
        let addresses = ["192.0.2.1/24", "2001:db8::1/64"];
        let net = addresses.iter().fold(net, |net, address| net.address(address.parse().unwrap()));
        let ShardedStacks { stacks, flow_steering } = open_sharded(net, CORES).unwrap();
        let (workers, _) = UserWorkers::new();
        let inboxes = (0..CORES).map(|_| InboxSender::new().unwrap());
        let (senders, mut others): (Vec<_>, Vec<_>) = inboxes.unzip();
        let inbox = others.remove(index);
        let cores = Cores::new(senders, &(1..=CORES), flow_steering, workers.clone());
        let slot = CoreSlot { index, inbox, cores: Arc::new(cores.unwrap()) };
        let (mut engines, mut claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let (engine, claims) = (engines.remove(index), claims.remove(index));
        let far = NetConfig::new(far).address("192.0.2.2/24".parse().unwrap());
        let (client, _) = open(far.address("2001:db8::2/64".parse().unwrap())).unwrap();
        let core =
            NetworkCore::new(slot, SocketServer::new(engine, claims), Arc::new(|_: &str| {}));
        Self { core: core.unwrap(), engines, others, client, workers }
    }

    fn attach(&mut self) -> AppNumber {
        let settings = AppSettings::default();
        let region = |words| Region::reserve(words).unwrap();
        let (control, data) = (region(GEOMETRY.control_words()), region(GEOMETRY.data_words()));
        let memory = SharedMemory::new(GEOMETRY, control, data).unwrap();
        // An application whose other end is closed has exited, which only a round finds out.
        let shared = |fd| AppFd::new(fd, 7, &self.workers);
        let connection = shared(UnixStream::pair().unwrap().0.into());
        let event_fds = EventFds::new().unwrap().map(shared);
        let identity =
            Identity { pid: 1, uid: 7, name: "test".to_owned(), library: Library::default() };
        let count = settings.attachments.add(7);
        let app = Application::new(identity, memory, connection, event_fds, None, count, &settings);
        self.core.cores.load(self.core.index).add_applications(1);
        self.core.insert_application(Box::new(app.unwrap()))
    }

    /// Binds a UDP socket of an application, with a claim of its own.
    fn bind(&mut self, number: AppNumber, address: &str, port: u16) {
        let local = (address.parse::<IpAddr>().unwrap(), port).into();
        let SocketServer { engine, sockets, socket_index, claims, .. } = &mut self.core.server;
        let id = engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap();
        let (protocol, sharing) = (TransportProtocol::Udp, PortSharing::Exclusive);
        let claim = claims.claim_among_cores(engine.device(), protocol, local, sharing, None);
        let app = self.core.apps[number as usize].as_mut().unwrap();
        let handle = app.slots.reserve().unwrap();
        let socket = AppSocket::udp(&app.memory, handle, id).unwrap().with_claim(claim.unwrap());
        let key = sockets.insert(socket.owned_by(Holder { app: number, slot: handle.slot }));
        app.insert_socket(handle, key).unwrap();
        socket_index.insert(StackSocketId::Udp(id), key);
    }

    /// Batches that core 1 has been sent.
    fn batches(&self) -> Vec<MigrationBatch> {
        let batch = |message| match message {
            CoreMessage::InsertBatch(batch) => *batch,
            _ => panic!("only batches are expected"),
        };
        self.others[0].messages.try_iter().map(batch).collect()
    }
}

#[test]
fn work_of_a_shed_grows_with_the_sockets_that_leave_only() {
    const APPS: usize = 100;
    /// Sockets of each application: half of them of each family.
    const SOCKETS: usize = 1000;
    let mut testbed = CoreTestbed::new(0);
    let apps: Vec<_> = (0..APPS).map(|_| testbed.attach()).collect();
    for (port, at) in (1..).zip(0..APPS * SOCKETS / 2) {
        for address in ADDRESSES {
            testbed.bind(apps[at % APPS], address, port);
        }
    }
    let core = &mut testbed.core;
    assert_eq!(core.server.sockets.len(), APPS * SOCKETS);
    core.server.sockets.take_steps();
    assert_eq!(core.count_migration_sets(), APPS);
    let steps = core.server.sockets.take_steps();
    assert!(steps <= 10 * APPS, "{steps} steps to count the groups");
    core.move_load(1, 0).unwrap();
    let steps = core.server.sockets.take_steps();
    assert!(steps <= 10 * APPS + 3 * SOCKETS, "{steps} steps to move one application");
    let batches = testbed.batches();
    assert_eq!((batches.len(), batches[0].sockets.len()), (1, SOCKETS));
}

/// The frames for the ports of a piece wait meanwhile.
#[test]
fn large_shed_leaves_in_pieces() {
    const APPS: usize = 40;
    /// Sockets of each application: that many applications leave together.
    const SOCKETS: usize = 100;
    const TOGETHER: usize = 2;
    let mut testbed = CoreTestbed::new(0);
    let apps: Vec<_> = (0..APPS).map(|_| testbed.attach()).collect();
    for (port, at) in (1..).zip(0..APPS * SOCKETS / 2) {
        for address in ADDRESSES {
            testbed.bind(apps[at % APPS], address, port);
        }
    }
    let stranger = LeavingApp { number: apps[0], token: TakeoverToken::new().unwrap() };
    testbed.core.move_next(1, &[stranger]).unwrap();
    assert!(testbed.batches().is_empty(), "the number is another application's");
    testbed.core.move_load(1, FULL_PERMILLE).unwrap();
    for left in (0..APPS / TOGETHER).rev() {
        let batches = testbed.batches();
        let [batch] = &batches[..] else { panic!("{} pieces at once", batches.len()) };
        assert_eq!((batch.apps.len(), batch.sockets.len()), (TOGETHER, TOGETHER * SOCKETS));
        assert_eq!(batch.next.len(), left * TOGETHER);
        // The other core has taken the batch.
        testbed.core.move_next(1, &batch.next).unwrap();
    }
    assert_eq!(testbed.core.server.sockets.len(), 0);
}

/// The core from which the sockets came has no space for them any more.
#[test]
fn sockets_that_both_cores_refuse_stay_where_they_were() {
    for own in ADDRESSES {
        let mut testbed = CoreTestbed::with_limit(0, 1);
        let number = testbed.attach();
        testbed.bind(number, own, 53);
        testbed.core.move_load(1, FULL_PERMILLE).unwrap();
        let mut batch = testbed.batches().pop().unwrap();
        assert_eq!(testbed.core.apps.iter().flatten().count(), 0);
        let local = SocketAddr::new(own.parse().unwrap(), 54);
        let stack = testbed.core.server.engine.parts().0;
        stack.udp_bind(local, UdpOptions::default()).unwrap();
        let refused = stack.udp_bind(SocketAddr::new(local.ip(), 55), UdpOptions::default());
        assert!(refused.is_err(), "the stack is full");
        (batch.is_returned, batch.from_core) = (true, 1);
        testbed.core.insert_batch(batch).unwrap();
        let app = testbed.core.apps.iter().flatten().next().expect("the application stays");
        let (_, key) = app.sockets().next().unwrap();
        let StackSocketId::Udp(id) = testbed.core.server.sockets.get(key).unwrap().id() else {
            panic!("a datagram socket")
        };
        let stack = testbed.core.server.engine.parts().0;
        assert_eq!(stack.udp_local_addr(id), Some(SocketAddr::new(local.ip(), 53)));
    }
}

#[test]
fn port_is_queried_at_the_cores_that_have_it_for_the_account_of_the_application() {
    let mut testbed = CoreTestbed::new(0);
    let number = testbed.attach();
    let core = &mut testbed.core;
    let cores = Arc::clone(&core.cores);
    let flow_steering = cores.flow_steering().unwrap();
    let port = (TransportProtocol::Udp, 53);
    flow_steering.claim(2, port, PortSharing::Exclusive).unwrap();
    let app = core.apps[number as usize].as_mut().unwrap();
    app.cpu_share.set_share(10, 1 << 40);
    let query = PortQuery {
        port,
        sharing: PortSharing::Exclusive,
        asking_core: 0,
        token: app.token,
        is_resolved: false,
        laps_left: 1,
        spent_ns: 1 << 39,
    };
    core.forward_query(query).unwrap();
    assert!(testbed.others[0].messages.try_recv().is_err(), "core 1 does not have the port");
    assert!(matches!(testbed.others[1].messages.try_recv(), Ok(CoreMessage::PortQuery(_))));
    let core = &mut testbed.core;
    core.on_port_query(PortQuery { is_resolved: true, ..query }).unwrap();
    let now_ns = core.server.engine.read_clock();
    let app = core.apps[number as usize].as_mut().unwrap();
    assert!(app.cpu_share.paused_until(now_ns).is_some(), "half the period was spent");
}

/// An upgrade must not blame the space on the primary core.
#[test]
fn core_that_cannot_send_its_sockets_gives_the_reason() {
    for (own, peer) in ADDRESSES.into_iter().zip(["192.0.2.2", "2001:db8::2"]) {
        let mut testbed = CoreTestbed::new(1);
        let number = testbed.attach();
        testbed.bind(number, own, 53);
        let CoreTestbed { core, engines, others, client, .. } = &mut testbed;
        let primary = &mut engines[0];
        let any = SocketAddr::new(peer.parse().unwrap(), 0);
        let socket = client.parts().0.udp_bind(any, UdpOptions::default()).unwrap();
        let to = SocketAddr::new(own.parse().unwrap(), 53);
        let (stack, arena, now_ns) = client.parts();
        stack.udp_send(now_ns, arena, socket, Some(to), None, b"x").unwrap();
        while !core.server.engine.device().has_passed_frames() {
            client.poll().unwrap();
            primary.poll().unwrap();
        }
        let arena = core.server.engine.parts().1;
        let frames: Vec<_> = std::iter::from_fn(|| arena.alloc()).collect();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    primary.poll().unwrap();
                }
            });
            core.move_all_to_primary().unwrap();
            is_done.store(true, Ordering::Relaxed);
        });
        let arena = core.server.engine.parts().1;
        frames.into_iter().for_each(|frame| arena.free(frame));
        let Ok(CoreMessage::Gathered { unmoved: 2, why }) = others[0].messages.try_recv() else {
            panic!("an application and a socket stay")
        };
        assert_eq!(why, Some(NotMigrated::NoFreeFrame));
    }
}
