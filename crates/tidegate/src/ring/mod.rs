//! Rings: many operations on many sockets by one call, and their results as completions.
//!
//! The concepts and names are those of `io_uring`. A [`Ring`] has a queue of [`Submission`]s and
//! a queue of [`Completion`]s, a table of sockets, and buffers of one size. A program pushes
//! operations, submits them together, and takes completions. Operations that cannot finish at once
//! stay in flight. The stack is locked once for all operations of a call. A stack in a daemon is
//! woken once for all, or not at all if it is awake.
//!
//! # Examples
//! ```
//! use std::time::Duration;
//!
//! use tidegate::ring::{Ring, RingConfig, Submission};
//! use tidegate::{Net, NetConfig, UdpSocket};
//!
//! const QUESTION: u64 = 1;
//!
//! let (device, _peer) = tidegate::mem::wire(&Default::default())?;
//! let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse().unwrap()))?;
//! let mut ring = Ring::new(&net, RingConfig::default())?;
//! let server = ring.add(UdpSocket::bind(&net, "192.0.2.1:7")?)?;
//! let client = ring.add(UdpSocket::bind(&net, "192.0.2.1:0")?)?;
//!
//! // Every datagram that arrives completes the same submission.
//! ring.push(Submission::recv(server).multishot().user_data(QUESTION))?;
//! let buffer = ring.take_buffer().ok_or("all buffers are in use")?;
//! ring.buffer_mut(buffer)[..5].copy_from_slice(b"hello");
//! ring.push(Submission::send_to(client, buffer, 5, "192.0.2.1:7".parse()?).skip_success())?;
//! ring.push(Submission::recv(client))?;
//!
//! let mut is_answered = false;
//! while !is_answered {
//!     ring.submit_and_wait(1, Some(Duration::from_secs(5)))?;
//!     while let Some(completion) = ring.completion() {
//!         let len = completion.result?;
//!         let buffer = completion.buffer.ok_or("nothing was received")?;
//!         match (completion.user_data, completion.from) {
//!             // The buffer goes back as it is.
//!             (QUESTION, Some(peer)) => {
//!                 ring.push(Submission::send_to(server, buffer, len, peer).skip_success())?;
//!             }
//!             _ => {
//!                 assert_eq!(&ring.buffer(buffer)[..len], b"hello");
//!                 ring.release_buffer(buffer);
//!                 is_answered = true;
//!             }
//!         }
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attempt;
mod buffers;
mod entry;
mod handle;
mod in_flight;
mod sockets;
mod state;

pub use buffers::BufferIndex;
pub use entry::{Completion, Submission};
pub use handle::{Ring, RingConfig};
pub use sockets::{Socket, SocketKey};
