//! Messages that descriptors come with.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors in a message; the kernel takes 253.
pub const MOST: usize = 128;

/// Sends a message with these descriptors, if there are any.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] when there are more than [`MOST`];
/// [`io::ErrorKind::WriteZero`] when not all of it was sent; what the kernel says.
pub fn send_with(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = SendAncillaryMessage::ScmRights(descriptors);
    let fits = descriptors.len() <= MOST && (descriptors.is_empty() || control.push(rights));
    if !fits {
        let what = "too many descriptors for a message";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let bytes_out = [IoSlice::new(bytes)];
    let send = || sendmsg(socket, &bytes_out, &mut control, SendFlags::NOSIGNAL);
    let sent = retry_on_intr(send)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Reads a message, which may be cut off, and at most so many descriptors that come
/// with it, [`MOST`] and fewer. Gives the length of what was read.
///
/// # Errors
/// What the kernel says.
pub fn receive_with(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    most: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let wanted = rustix::cmsg_space!(ScmRights(most.min(MOST)));
    let mut control = RecvAncillaryBuffer::new(&mut space[..wanted]);
    let mut into = [IoSliceMut::new(bytes)];
    // A program's signals are no reason to do without an answer.
    let receive = || recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC);
    let received = retry_on_intr(receive)?;
    let only = |message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    };
    // Space comes in steps: one more may have found room.
    let descriptors = control.drain().filter_map(only).flatten().take(most).collect();
    Ok((received.bytes, descriptors))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn no_more_descriptors_are_taken_than_are_wanted() {
        let (near, far) = UnixStream::pair().unwrap();
        for (sent, most, expected) in
            [(0, 1, 0), (1, 1, 1), (8, 1, 1), (8, 2, 2), (MOST, MOST, MOST)]
        {
            let all = vec![near.as_fd(); sent];
            send_with(near.as_fd(), b"text", &all).unwrap();
            let mut bytes = [0; 16];
            let (len, descriptors) = receive_with(far.as_fd(), &mut bytes, most).unwrap();
            assert_eq!((&bytes[..len], descriptors.len()), (&b"text"[..], expected));
        }
        let many = vec![near.as_fd(); MOST + 1];
        let refused = send_with(near.as_fd(), b"text", &many).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
