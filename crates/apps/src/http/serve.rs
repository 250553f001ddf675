//! HTTP connections, with the same code on Tidegate and on kernel sockets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tidegate::Net;
use tidegate::tokio::drive;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

use super::Service;
use crate::kernel_listener::listen_on;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time that requests in progress get to finish when the server stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Delay after a failed accept: usually the process is out of file descriptors and has to close
/// some first.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Limits of one HTTP server.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Concurrent connections; further connections wait to be accepted.
    pub max_connections: usize,
    /// Time limit for receiving a request head, which is also the keep-alive idle time-out.
    pub header_timeout: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self { max_connections: 65_536, header_timeout: Duration::from_secs(30) }
    }
}

/// Listener that accepts connections.
pub trait HttpListener: Send + Sync + 'static {
    /// Accepted connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Polls for the next connection.
    ///
    /// # Errors
    /// When no connection can be accepted now.
    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>>;
}

impl HttpListener for tidegate::tokio::TcpListener {
    type Stream = tidegate::tokio::TcpStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>> {
        self.poll_accept(context).map_ok(|(stream, _)| stream)
    }
}

impl HttpListener for tokio::net::TcpListener {
    type Stream = tokio::net::TcpStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>> {
        self.poll_accept(context).map(|accepted| {
            let (stream, _) = accepted?;
            stream.set_nodelay(true)?;
            Ok(stream)
        })
    }
}

/// Serves HTTP on Tidegate until `stop` is set, which is noticed within 100 ms. Runs on the
/// calling thread only.
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
/// use tidegate_apps::http::{HttpLimits, Service, serve_http};
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse()?))?;
/// let listener = TcpListener::bind(&net, "192.0.2.1:80")?;
/// let service = Arc::new(Service::new(Some(Path::new("/srv/www")), || serde_json::json!({}))?);
/// let stop = AtomicBool::new(false);
/// serve_http(&net, vec![listener], &service, HttpLimits::default(), &stop)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_http(
    net: &Net,
    listeners: Vec<tidegate::TcpListener>,
    service: &Arc<Service>,
    limits: HttpLimits,
    stop: &AtomicBool,
) -> io::Result<()> {
    let driver = drive(net.clone());
    let listeners = listeners.into_iter().map(tidegate::tokio::TcpListener::from);
    run(async { Ok(listeners.collect()) }, driver, service, limits, stop)
}

/// As [`serve_http`], on kernel sockets. Calls `ready` once the server listens.
///
/// # Errors
/// When an address cannot be listened on.
pub fn serve_http_kernel(
    addresses: &[SocketAddr],
    service: &Arc<Service>,
    limits: HttpLimits,
    stop: &AtomicBool,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let listeners = async {
        let mut listeners = Vec::new();
        for &address in addresses {
            let listener = listen_on(address)?;
            listeners.push(tokio::net::TcpListener::from_std(listener)?);
        }
        ready()?;
        Ok(listeners)
    };
    run(listeners, std::future::pending(), service, limits, stop)
}

fn run<L: HttpListener>(
    listeners: impl Future<Output = io::Result<Vec<L>>>,
    driver: impl Future<Output = io::Result<()>> + Send + 'static,
    service: &Arc<Service>,
    limits: HttpLimits,
    stop: &AtomicBool,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut driver = tokio::spawn(driver);
        let graceful = Arc::new(GracefulShutdown::new());
        let permits = Arc::new(Semaphore::new(limits.max_connections));
        let accepting = listeners.await?.into_iter().map(|listener| {
            let (service, graceful, permits) = (service.clone(), graceful.clone(), permits.clone());
            tokio::spawn(accept(listener, service, limits, graceful, permits))
        });
        let accepting: Vec<_> = accepting.collect();
        while !stop.load(Ordering::Relaxed) {
            if let Ok(ended) = tokio::time::timeout(STOP_CHECK_INTERVAL, &mut driver).await {
                return ended.unwrap_or_else(|error| Err(io::Error::other(error)));
            }
        }
        for task in accepting {
            task.abort();
            // The task was aborted: its result does not matter.
            let _ = task.await;
        }
        if let Some(graceful) = Arc::into_inner(graceful) {
            // Requests still in progress after the time-out are aborted.
            let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, graceful.shutdown()).await;
        }
        Ok(())
    })
}

async fn accept<L: HttpListener>(
    listener: L,
    service: Arc<Service>,
    limits: HttpLimits,
    graceful: Arc<GracefulShutdown>,
    permits: Arc<Semaphore>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).pipeline_flush(true);
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let accepted = std::future::poll_fn(|context| listener.poll_accept(context)).await;
        let Ok(stream) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            continue;
        };
        let open = OpenConnection::new(Arc::clone(&service));
        let respond = service_fn(move |request| {
            let service = Arc::clone(&open.0);
            async move { service.respond(request).await }
        });
        let connection = http.serve_connection(TokioIo::new(stream), respond);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that disconnects or sends garbage affects its own connection only.
            let _ = connection.await;
            drop(permit);
        });
    }
}

/// Counts a connection as open until it is dropped.
struct OpenConnection(Arc<Service>);

impl OpenConnection {
    fn new(service: Arc<Service>) -> Self {
        let counters = service.counters();
        counters.connections.fetch_add(1, Ordering::Relaxed);
        counters.connections_open.fetch_add(1, Ordering::Relaxed);
        Self(service)
    }

    fn open_count(&self) -> &AtomicU64 {
        &self.0.counters().connections_open
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.open_count().fetch_sub(1, Ordering::Relaxed);
    }
}
