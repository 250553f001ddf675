//! Echo server of TCP and UDP on kernel sockets, for runs under the preload library: one thread and
//! epoll.
//!
//! The server of `tidegate serve echo --io kernel` makes its system calls itself, so the preload
//! library cannot move its sockets.

use std::io;

use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Builder;

use crate::error::LabError;

/// Echoes TCP connections and datagrams to `port` until the process ends.
///
/// # Errors
/// If the port is in use, or the process has no free descriptor.
pub fn run(port: u16) -> Result<(), LabError> {
    let failed = || LabError::io("the echo server failed");
    let runtime = Builder::new_current_thread().enable_io().build().map_err(failed())?;
    runtime.block_on(serve(port)).map_err(failed())
}

async fn serve(port: u16) -> io::Result<()> {
    // Both families.
    let (listener, socket) =
        (TcpListener::bind(("::", port)).await?, UdpSocket::bind(("::", port)).await?);
    tokio::spawn(echo_datagrams(socket));
    accept_all(&listener).await
}

async fn echo_datagrams(socket: UdpSocket) {
    let mut buf = [0; 4096];
    loop {
        // Errors are those of datagrams that were sent before.
        if let Ok((bytes, peer)) = socket.recv_from(&mut buf).await {
            let _ = socket.send_to(&buf[..bytes], peer).await;
        }
    }
}

async fn accept_all(listener: &TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        // A client that disconnects affects its own connection only.
        tokio::spawn(async move { echo(&stream).await.ok() });
    }
}

async fn echo(stream: &TcpStream) -> io::Result<()> {
    let mut buf = [0; 4096];
    loop {
        stream.readable().await?;
        let received = match stream.try_read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        let mut sent = 0;
        while sent < received {
            match stream.try_write(&buf[sent..received]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.writable().await?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
