//! Server: accepts connections and runs their tasks, with the same code on Tidegate and on kernel
//! sockets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::Net;
use tidegate::tokio::drive;
use tokio::time::{sleep, timeout};

use super::connection::serve_connection;
use super::connections::Connections;
use super::listener::NfsListener;
use super::service::NfsService;
use crate::kernel_listener::{listen_on, raise_descriptor_limit};

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Delay after an accept that failed: descriptors or memory were missing.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Serves NFS on Tidegate until `stop` is set, which is noticed within 100 ms. Runs on the calling
/// thread only. The listeners should have the options of [`super::NfsLimits::tcp_options`].
///
/// # Errors
/// When the device fails for good.
///
/// # Examples
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use std::sync::atomic::AtomicBool;
///
/// use tidegate::{Net, NetConfig, TcpListener};
/// use tidegate_apps::nfs::{NfsLimits, NfsService, serve_nfs};
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse()?))?;
/// let limits = NfsLimits::default();
/// let listener = TcpListener::bind_with(&net, "192.0.2.1:2049", 4096, limits.tcp_options())?;
/// let service = Arc::new(NfsService::new(Path::new("/srv/files"), limits)?);
/// serve_nfs(&net, vec![listener], &service, &AtomicBool::new(false))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_nfs(
    net: &Net,
    listeners: Vec<tidegate::TcpListener>,
    service: &Arc<NfsService>,
    stop: &AtomicBool,
) -> io::Result<()> {
    let driver = drive(net.clone());
    let listeners = listeners.into_iter().map(tidegate::tokio::TcpListener::from);
    run(async { Ok(listeners.collect()) }, driver, service, stop)
}

/// As [`serve_nfs`], on kernel sockets. Calls `ready` once the server listens.
///
/// # Errors
/// When an address cannot be listened on.
pub fn serve_nfs_kernel(
    addresses: &[SocketAddr],
    service: &Arc<NfsService>,
    stop: &AtomicBool,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    raise_descriptor_limit()?;
    let listeners = async {
        let listen = |&address| tokio::net::TcpListener::from_std(listen_on(address)?);
        let listeners = addresses.iter().map(listen).collect::<io::Result<Vec<_>>>()?;
        ready()?;
        Ok(listeners)
    };
    run(listeners, std::future::pending(), service, stop)
}

/// Clients repeat calls whose replies were under way when the server stopped.
fn run<L: NfsListener>(
    listeners: impl Future<Output = io::Result<Vec<L>>>,
    driver: impl Future<Output = io::Result<()>> + Send + 'static,
    service: &Arc<NfsService>,
    stop: &AtomicBool,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut driver = tokio::spawn(driver);
        let connections = Arc::new(Connections::default());
        for listener in listeners.await? {
            tokio::spawn(accept(listener, Arc::clone(service), Arc::clone(&connections)));
        }
        while !stop.load(Ordering::Relaxed) {
            if let Ok(ended) = timeout(STOP_CHECK_INTERVAL, &mut driver).await {
                return ended.unwrap_or_else(|error| Err(io::Error::other(error)));
            }
        }
        Ok(())
    })
}

async fn accept<L: NfsListener>(
    listener: L,
    service: Arc<NfsService>,
    connections: Arc<Connections>,
) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(RETRY_DELAY).await;
            continue;
        };
        let entry = connections.add(peer.ip(), &service.limits());
        let id = entry.id();
        let task = tokio::spawn(serve_connection(stream, Arc::clone(&service), entry));
        connections.set_task(id, task.abort_handle());
    }
}
