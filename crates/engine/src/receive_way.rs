//! Ways in which frames are received.

/// Way in which frames are received from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveWay {
    /// Nobody else looks at them.
    Plain,
    /// The time of their arrival is noted.
    Timed,
    /// Through admission or a capture, and noted too if that is wanted.
    Special,
}
