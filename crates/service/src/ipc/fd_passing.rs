//! Messages with file descriptors (`SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Maximum number of descriptors in a message. The kernel's limit is 253.
pub const MAX_FDS: usize = 128;

/// Sends a message with the given descriptors.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for more than `MAX_FDS` descriptors;
/// [`io::ErrorKind::WriteZero`] if the message was sent in part; errors of `sendmsg`.
pub fn send_with_fds(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = SendAncillaryMessage::ScmRights(fds);
    let fits = fds.len() <= MAX_FDS && (fds.is_empty() || control.push(rights));
    if !fits {
        let message = "too many file descriptors for one message";
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let bytes_out = [IoSlice::new(bytes)];
    let send = || sendmsg(socket, &bytes_out, &mut control, SendFlags::NOSIGNAL);
    let sent = retry_on_intr(send)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives a message and up to `max_fds` descriptors, at most `MAX_FDS`. A longer message is
/// truncated. Returns the number of bytes received and the descriptors.
///
/// # Errors
/// Errors of `recvmsg`.
pub fn receive_with_fds(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    max_fds: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let control_bytes = rustix::cmsg_space!(ScmRights(max_fds.min(MAX_FDS)));
    let mut control = RecvAncillaryBuffer::new(&mut space[..control_bytes]);
    let mut buffers = [IoSliceMut::new(bytes)];
    // A signal of the application must not lose the reply.
    let receive = || recvmsg(socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC);
    let received = retry_on_intr(receive)?;
    let fds_of = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    // Control space is rounded up: one descriptor more than requested may fit.
    let fds = control.drain().filter_map(fds_of).flatten().take(max_fds).collect();
    Ok((received.bytes, fds))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn receives_at_most_the_requested_fds() {
        let (near, far) = UnixStream::pair().unwrap();
        for (sent, max_fds, expected) in
            [(0, 1, 0), (1, 1, 1), (8, 1, 1), (8, 2, 2), (MAX_FDS, MAX_FDS, MAX_FDS)]
        {
            let all = vec![near.as_fd(); sent];
            send_with_fds(near.as_fd(), b"text", &all).unwrap();
            let mut bytes = [0; 16];
            let (len, fds) = receive_with_fds(far.as_fd(), &mut bytes, max_fds).unwrap();
            assert_eq!((&bytes[..len], fds.len()), (&b"text"[..], expected));
        }
        let many = vec![near.as_fd(); MAX_FDS + 1];
        let refused = send_with_fds(near.as_fd(), b"text", &many).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
