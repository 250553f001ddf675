//! Frame Streams (fstrm): data frames with a length in front, between control frames.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Content type of the streams.
const CONTENT_TYPE: &[u8] = b"protobuf:dnstap.Dnstap";
/// Control field of the content type.
const FIELD_CONTENT_TYPE: u32 = 1;
/// Maximum length of a control frame, as in fstrm.
const MAX_CONTROL_BYTES: usize = 512;
/// Time limit of each step with a receiver. Only the thread of the log waits.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    Accept = 1,
    Start = 2,
    Stop = 3,
    Ready = 4,
    Finish = 5,
}

impl Control {
    const ALL: [Self; 5] = [Self::Accept, Self::Start, Self::Stop, Self::Ready, Self::Finish];

    fn has_content_type(self) -> bool {
        matches!(self, Self::Accept | Self::Start | Self::Ready)
    }

    pub(super) fn write(self, stream: &mut impl Write) -> io::Result<()> {
        let mut content = (self as u32).to_be_bytes().to_vec();
        if self.has_content_type() {
            content.extend(FIELD_CONTENT_TYPE.to_be_bytes());
            content.extend((CONTENT_TYPE.len() as u32).to_be_bytes());
            content.extend(CONTENT_TYPE);
        }
        // A length of zero announces a control frame.
        let mut frame = vec![0; 4];
        frame.extend(data_frame(&content));
        stream.write_all(&frame)
    }

    /// Reads a control frame. Its content type must be that of dnstap, if it has one.
    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "no dnstap receiver");
        let mut word = || -> io::Result<u32> {
            let mut bytes = [0; 4];
            stream.read_exact(&mut bytes)?;
            Ok(u32::from_be_bytes(bytes))
        };
        let (escape, len) = (word()?, word()? as usize);
        if escape != 0 || !(4..=MAX_CONTROL_BYTES).contains(&len) {
            return Err(unexpected());
        }
        let number = word()?;
        let mut fields = vec![0; len - 4];
        stream.read_exact(&mut fields)?;
        let control = Self::ALL.into_iter().find(|control| *control as u32 == number);
        let control = control.ok_or_else(unexpected)?;
        let is_dnstap =
            fields.is_empty() || fields.windows(CONTENT_TYPE.len()).any(|at| at == CONTENT_TYPE);
        if is_dnstap { Ok(control) } else { Err(unexpected()) }
    }
}

/// Frame of these bytes.
pub(super) fn data_frame(content: &[u8]) -> Vec<u8> {
    let mut frame = (content.len() as u32).to_be_bytes().to_vec();
    frame.extend(content);
    frame
}

/// Stream after its first control frames. Dropping it ends the stream in order.
#[derive(Debug)]
pub(super) enum FrameStream {
    File(File),
    Socket(UnixStream),
}

impl FrameStream {
    /// Connects to a Unix socket if there is one, and creates a file otherwise.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let is_socket = fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if !is_socket {
            // A stream cannot be continued.
            let mut file = File::create_new(path)?;
            Control::Start.write(&mut file)?;
            return Ok(Self::File(file));
        }
        let mut socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        Control::Ready.write(&mut socket)?;
        if Control::read(&mut socket)? != Control::Accept {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the receiver does not accept"));
        }
        Control::Start.write(&mut socket)?;
        Ok(Self::Socket(socket))
    }
}

impl Write for FrameStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Socket(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for FrameStream {
    fn drop(&mut self) {
        // A receiver that is gone needs no end.
        let _ = Control::Stop.write(self);
    }
}
