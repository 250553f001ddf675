//! HTTP connections, on Tidegate and on kernel sockets by the same code.

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

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// How long requests that are being answered may take when the server stops.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// How long to wait after a connection could not be accepted: most often the
/// process has too many descriptors, and somebody has to close one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// What one server takes upon itself.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Connections at the same time; more wait to be accepted.
    pub connections: usize,
    /// How long a client may take for the head of a request, and be silent
    /// between two.
    pub header_timeout: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self { connections: 65_536, header_timeout: Duration::from_secs(30) }
    }
}

/// A listener that connections are taken from.
pub trait HttpSocket: Send + Sync + 'static {
    /// One connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// A connection, when there is one.
    ///
    /// # Errors
    /// When none can be had now.
    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>>;
}

impl HttpSocket for tidegate::tokio::TcpListener {
    type Stream = tidegate::tokio::TcpStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>> {
        self.poll_accept(context).map_ok(|(stream, _)| stream)
    }
}

impl HttpSocket for tokio::net::TcpListener {
    type Stream = tokio::net::TcpStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>> {
        self.poll_accept(context).map(|accepted| {
            let (stream, _) = accepted?;
            stream.set_nodelay(true)?;
            Ok(stream)
        })
    }
}

/// Serves on Tidegate until `stop` is set, which is noticed within a tenth of
/// a second. One thread does everything.
///
/// # Errors
/// When the port is of no further use.
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

/// As [`serve_http`], on the kernel's sockets.
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

fn run<L: HttpSocket>(
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
        let room = Arc::new(Semaphore::new(limits.connections));
        let accepting = listeners.await?.into_iter().map(|listener| {
            let (service, graceful, room) = (service.clone(), graceful.clone(), room.clone());
            tokio::spawn(accept(listener, service, limits, graceful, room))
        });
        let accepting: Vec<_> = accepting.collect();
        while !stop.load(Ordering::Relaxed) {
            if let Ok(ended) = tokio::time::timeout(STOP_CHECK, &mut driver).await {
                return ended.unwrap_or_else(|error| Err(io::Error::other(error)));
            }
        }
        for task in accepting {
            task.abort();
            // Its end is what was asked for.
            let _ = task.await;
        }
        if let Some(graceful) = Arc::into_inner(graceful) {
            // What is not done by then is broken off.
            let _ = tokio::time::timeout(STOP_LIMIT, graceful.shutdown()).await;
        }
        Ok(())
    })
}

async fn accept<L: HttpSocket>(
    listener: L,
    service: Arc<Service>,
    limits: HttpLimits,
    graceful: Arc<GracefulShutdown>,
    room: Arc<Semaphore>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).pipeline_flush(true);
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let accepted = std::future::poll_fn(|context| listener.poll_accept(context)).await;
        let Ok(stream) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let open = Open::new(Arc::clone(&service));
        let respond = service_fn(move |request| {
            let service = Arc::clone(&open.0);
            async move { service.respond(request).await }
        });
        let connection = http.serve_connection(TokioIo::new(stream), respond);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that breaks off or sends nonsense harms only itself.
            let _ = connection.await;
            drop(permit);
        });
    }
}

/// Counts a connection as open until it is dropped.
struct Open(Arc<Service>);

impl Open {
    fn new(service: Arc<Service>) -> Self {
        let counters = service.counters();
        counters.connections.fetch_add(1, Ordering::Relaxed);
        counters.connections_open.fetch_add(1, Ordering::Relaxed);
        Self(service)
    }

    fn open(&self) -> &AtomicU64 {
        &self.0.counters().connections_open
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.open().fetch_sub(1, Ordering::Relaxed);
    }
}
