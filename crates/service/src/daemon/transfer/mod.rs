//! Transfer of sockets between processes: the table of sockets in transit, and the requests to
//! send and to receive a socket.

pub(super) mod request;
pub(super) mod table;
