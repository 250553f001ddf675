//! Server: accepts connections and runs their tasks, with the same code on Tidegate and on kernel
//! sockets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::Net;
use tidegate::tokio::drive;
use tokio::time::{Instant, sleep, timeout};

use super::connection::Connection;
use super::descriptors::{is_out_of_descriptors, raise_limit};
use super::ledger::Ledger;
use super::listener::HttpListener;
use super::request_queue::RequestQueue;
use super::service::Service;
use super::settings::HttpSettings;
use crate::kernel_listener::listen_on;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time that requests in progress get to finish when the server stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which a stopping server checks for open connections, and delay after an accept
/// that failed or found no memory.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Descriptors of a connection: of the file that is sent, and of the kernel's socket.
const FILE_DESCRIPTORS: u64 = 1;
const KERNEL_DESCRIPTORS: u64 = 2;

/// Serves HTTP on Tidegate until `stop` is set, which is noticed within 100 ms. Runs on the
/// calling thread only. The listeners should have the options of
/// [`HttpLimits::tcp_options`](super::HttpLimits::tcp_options).
///
/// Raises the process's limit of file descriptors to its hard limit.
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
/// use tidegate_apps::http::{HttpLimits, HttpSettings, Service, serve_http};
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse()?))?;
/// let limits = HttpLimits::default();
/// let listener = TcpListener::bind_with(&net, "192.0.2.1:80", 4096, limits.tcp_options())?;
/// let service = Arc::new(Service::new(Some(Path::new("/srv/www")), || serde_json::json!({}))?);
/// let stop = AtomicBool::new(false);
/// let settings = HttpSettings { limits, requests: None };
/// serve_http(&net, vec![listener], &service, settings, &stop)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_http(
    net: &Net,
    listeners: Vec<tidegate::TcpListener>,
    service: &Arc<Service>,
    settings: HttpSettings,
    stop: &AtomicBool,
) -> io::Result<()> {
    let driver = drive(net.clone());
    let max_connections = raise_limit(FILE_DESCRIPTORS)?;
    let listeners = listeners.into_iter().map(tidegate::tokio::TcpListener::from);
    run(async { Ok(listeners.collect()) }, driver, service, (settings, max_connections), stop)
}

/// As [`serve_http`], on kernel sockets. Calls `ready` once the server listens.
///
/// # Errors
/// When an address cannot be listened on.
pub fn serve_http_kernel(
    addresses: &[SocketAddr],
    service: &Arc<Service>,
    settings: HttpSettings,
    stop: &AtomicBool,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let max_connections = raise_limit(KERNEL_DESCRIPTORS)?;
    let listeners = async {
        let mut listeners = Vec::new();
        for &address in addresses {
            let listener = listen_on(address)?;
            listeners.push(tokio::net::TcpListener::from_std(listener)?);
        }
        ready()?;
        Ok(listeners)
    };
    run(listeners, std::future::pending(), service, (settings, max_connections), stop)
}

fn run<L: HttpListener>(
    listeners: impl Future<Output = io::Result<Vec<L>>>,
    driver: impl Future<Output = io::Result<()>> + Send + 'static,
    service: &Arc<Service>,
    (settings, max_connections): (HttpSettings, usize),
    stop: &AtomicBool,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut driver = tokio::spawn(driver);
        let limits = settings.limits.within_descriptors(max_connections);
        let ledger = Arc::new(Ledger::new(limits));
        let queue = Arc::new(RequestQueue::new());
        queue.replace(settings.requests);
        tokio::spawn(Arc::clone(&queue).run());
        let accepting = listeners.await?.into_iter().map(|listener| {
            let shared = (Arc::clone(service), Arc::clone(&ledger), Arc::clone(&queue));
            tokio::spawn(accept(listener, shared))
        });
        let accepting: Vec<_> = accepting.collect();
        let mut seen = 0;
        while !stop.load(Ordering::Relaxed) {
            if let Some(settings) = service.new_settings(&mut seen) {
                ledger.set_limits(settings.limits.within_descriptors(max_connections));
                queue.replace(settings.requests);
            }
            if let Ok(ended) = timeout(STOP_CHECK_INTERVAL, &mut driver).await {
                return ended.unwrap_or_else(|error| Err(io::Error::other(error)));
            }
        }
        for task in accepting {
            task.abort();
            // The task was aborted: its result does not matter.
            let _ = task.await;
        }
        ledger.stop();
        let stopped = async {
            while ledger.connections() > 0 {
                sleep(RETRY_DELAY).await;
            }
        };
        // Requests still in progress after the time-out are aborted.
        let _ = timeout(SHUTDOWN_TIMEOUT, stopped).await;
        Ok(())
    })
}

async fn accept<L: HttpListener>(
    listener: L,
    (service, ledger, queue): (Arc<Service>, Arc<Ledger>, Arc<RequestQueue>),
) {
    loop {
        let limits = ledger.limits();
        let accepted = std::future::poll_fn(|context| listener.poll_accept(context, &limits)).await;
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if is_out_of_descriptors(&error) {
                    ledger.release_descriptors(Instant::now());
                }
                sleep(RETRY_DELAY).await;
                continue;
            }
        };
        while !ledger.make_room(Instant::now()) {
            sleep(RETRY_DELAY).await;
        }
        let shared = (&service, &ledger, &queue);
        tokio::spawn(Connection::new(stream, peer.ip(), shared, ledger.limits()));
    }
}
