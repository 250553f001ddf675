//! TCP sockets for tokio: futures, [`AsyncRead`](::tokio::io::AsyncRead) and
//! [`AsyncWrite`](::tokio::io::AsyncWrite).
//!
//! Something must drive the stack: the task [`drive`], spawned once, or a dedicated thread
//! ([`crate::NetConfig::own_thread`]).
//!
//! # Examples
//! ```
//! use tidegate::{Net, NetConfig};
//! use tidegate::tokio::{TcpListener, TcpStream, drive};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (device_a, device_b) = tidegate::mem::wire(&Default::default())?;
//! let a = Net::open(NetConfig::new(device_a).address("192.0.2.1/24".parse()?))?;
//! let b = Net::open(NetConfig::new(device_b).address("192.0.2.2/24".parse()?))?;
//! tokio::spawn(drive(a.clone()));
//! tokio::spawn(drive(b.clone()));
//!
//! let listener = TcpListener::bind(&a, "192.0.2.1:7")?;
//! tokio::spawn(async move {
//!     let (mut stream, _) = listener.accept().await?;
//!     stream.write_all(b"hello").await
//! });
//! let mut stream = TcpStream::connect(&b, "192.0.2.1:7").await?;
//! let mut received = String::new();
//! stream.read_to_string(&mut received).await?;
//! assert_eq!(received, "hello");
//! # Ok(())
//! # }
//! ```

mod drive;
mod listener;
mod stream;

pub use drive::drive;
pub use listener::TcpListener;
pub use stream::TcpStream;
