//! TCP sockets for tokio: futures, [`AsyncRead`](::tokio::io::AsyncRead) and
//! [`AsyncWrite`](::tokio::io::AsyncWrite).
//!
//! Somebody has to run the stack. That is the task [`drive`], spawned once, or
//! a thread of the stack's own ([`crate::NetConfig::own_thread`]).
//!
//! ```
//! use tidegate::{Net, NetConfig};
//! use tidegate::tokio::{TcpListener, TcpStream, drive};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (port_a, port_b) = tidegate::mem::wire(&Default::default())?;
//! let a = Net::open(NetConfig::new(port_a).address("192.0.2.1/24".parse()?))?;
//! let b = Net::open(NetConfig::new(port_b).address("192.0.2.2/24".parse()?))?;
//! tokio::spawn(drive(a.clone()));
//! tokio::spawn(drive(b.clone()));
//!
//! let listener = TcpListener::bind(&a, "192.0.2.1:7")?;
//! tokio::spawn(async move {
//!     let (mut stream, _) = listener.accept().await?;
//!     stream.write_all(b"high water").await
//! });
//! let mut stream = TcpStream::connect(&b, "192.0.2.1:7").await?;
//! let mut text = String::new();
//! stream.read_to_string(&mut text).await?;
//! assert_eq!(text, "high water");
//! # Ok(())
//! # }
//! ```

mod drive;
mod listener;
mod stream;

pub use drive::drive;
pub use listener::TcpListener;
pub use stream::TcpStream;
