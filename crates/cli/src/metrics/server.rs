//! HTTP server of the metrics, on a thread of its own.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::header::{ACCEPT, ALLOW, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, body::Incoming};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};

use super::MetricsSource;
use super::text::{self, Format};
use crate::Failure;
use crate::background::BackgroundThread;

/// Maximum number of connections at a time: a monitoring system has one or two.
const MAX_CONNECTIONS: usize = 16;
/// Time for the head of a request, also for the first and while a connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time that a connection is kept, whatever its client does.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);

/// Bound address of a metrics server that does not serve yet.
pub(crate) struct MetricsListener {
    listener: TcpListener,
    runtime: Runtime,
}

impl MetricsListener {
    /// Binds the address. With `shares_port` another process of this user may bind it too, for the
    /// time of an upgrade.
    pub(super) fn bind(address: SocketAddr, shares_port: bool) -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let bind = async || {
            let socket = match address {
                SocketAddr::V4(_) => TcpSocket::new_v4()?,
                SocketAddr::V6(_) => TcpSocket::new_v6()?,
            };
            socket.set_reuseaddr(true)?;
            socket.set_reuseport(shares_port)?;
            socket.bind(address)?;
            socket.listen(MAX_CONNECTIONS as u32)
        };
        let listener = runtime.block_on(bind()).map_err(|error: io::Error| {
            format!("--metrics {address}: {error}; give an address of this host and a free port")
        })?;
        Ok(Self { listener, runtime })
    }

    /// Address that is bound.
    #[cfg(test)]
    fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves the readings of `source` until the returned value is dropped.
    pub(crate) fn serve(
        self,
        source: impl MetricsSource,
        background: BackgroundThread,
    ) -> io::Result<MetricsServer> {
        let (end, ended) = StdUnixStream::pair()?;
        ended.set_nonblocking(true)?;
        let serve = move || {
            background.apply();
            let Self { listener, runtime } = self;
            runtime.block_on(accept_until_ended(&listener, ended, Arc::new(source)));
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned()).spawn(serve)?;
        Ok(MetricsServer { end: Some(end), thread: Some(thread) })
    }
}

/// Thread that serves metrics. Dropping it ends the thread and its connections.
pub(crate) struct MetricsServer {
    end: Option<StdUnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Accepts connections until the other end of `ended` is closed.
async fn accept_until_ended<S: MetricsSource>(
    listener: &TcpListener,
    ended: StdUnixStream,
    source: Arc<S>,
) {
    let Ok(ended) = UnixStream::from_std(ended) else { return };
    // Each connection holds a clone.
    let open = Arc::new(());
    loop {
        let next = poll_fn(|context| match ended.poll_read_ready(context) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => listener.poll_accept(context).map(Some),
        });
        match next.await {
            None => return,
            // One connection too many is closed at once.
            Some(Ok((stream, _))) if Arc::strong_count(&open) <= MAX_CONNECTIONS => {
                let (source, open) = (Arc::clone(&source), Arc::clone(&open));
                tokio::spawn(async move {
                    serve_connection(stream, source).await;
                    drop(open);
                });
            }
            Some(Ok(_)) => {}
            // Descriptors may have run out for a while.
            Some(Err(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn serve_connection<S: MetricsSource>(stream: TcpStream, source: Arc<S>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = respond(&request, &*source);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    // A client that goes away needs no report.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
}

/// Page that draws the metrics, which it fetches once a second.
const PAGE: &str = include_str!("page.html");
/// The page loads nothing but the metrics, and no other page may frame it.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                           connect-src 'self'; base-uri 'none'; frame-ancestors 'none'";

fn respond<B>(request: &Request<B>, source: &impl MetricsSource) -> Response<String> {
    let path = request.uri().path();
    if !matches!(path, "/" | "/metrics") {
        return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics, a page at /\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    if path == "/" {
        let mut response = Response::new(PAGE.to_owned());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
        return response;
    }
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::accepted_by(accept.unwrap_or_default());
    let read = source.read().and_then(|readings| Ok(text::write(readings, format)?));
    match read {
        Ok(text) => {
            let mut response = Response::new(text);
            let kind = HeaderValue::from_static(format.content_type());
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Err(error) => plain(StatusCode::SERVICE_UNAVAILABLE, &format!("{error}\n")),
    }
}

fn plain(status: StatusCode, text: &str) -> Response<String> {
    let mut response = Response::new(text.to_owned());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream as StdTcpStream;

    use super::super::Readings;
    use super::*;

    struct Fixed(bool);

    impl MetricsSource for Fixed {
        fn read(&self) -> Result<Readings, Failure> {
            if self.0 { Ok(Readings::of_command("test")) } else { Err("the core has ended".into()) }
        }
    }

    fn server(works: bool) -> (MetricsServer, SocketAddr) {
        let listener = MetricsListener::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = listener.address().unwrap();
        let background = BackgroundThread::like_this_thread().unwrap();
        (listener.serve(Fixed(works), background).unwrap(), address)
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = StdTcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(address: SocketAddr, path: &str) -> String {
        ask(address, &format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"))
    }

    #[test]
    fn metrics_are_served_until_the_end() {
        let (server, address) = server(true);
        let answer = get(address, "/metrics");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("version=0.0.4") && answer.contains("tidegate_build_info{"));
        let page = get(address, "/");
        assert!(page.contains("text/html") && page.contains("default-src 'none'"), "{page}");
        assert!(get(address, "/other").starts_with("HTTP/1.1 404"));
        let post =
            "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        assert!(ask(address, post).starts_with("HTTP/1.1 405"));
        assert!(ask(address, "\r\n\0\x7f nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));
        drop(server);
        assert!(StdTcpStream::connect(address).is_err(), "the port is free again");
    }

    #[test]
    fn source_that_fails_gives_503() {
        let (_server, address) = server(false);
        let answer = get(address, "/metrics");
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("has ended"), "{answer}");
    }

    #[test]
    fn connections_are_limited_and_do_not_hold_up_the_end() {
        let (server, address) = server(true);
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut stream = StdTcpStream::connect(address).unwrap();
            // An answer says that the server has the connection.
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
            stream.read_exact(&mut [0; 12]).unwrap();
            held.push(stream);
        }
        let mut refused = StdTcpStream::connect(address).unwrap();
        assert!(matches!(refused.read(&mut [0; 1]), Ok(0) | Err(_)), "closed without an answer");
        drop(server);
    }

    #[test]
    fn address_in_use_is_an_error_that_names_the_flag() {
        let listener = MetricsListener::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let error = MetricsListener::bind(listener.address().unwrap(), false).err().unwrap();
        assert!(error.to_string().starts_with("--metrics 127.0.0.1:"), "{error}");
    }
}
