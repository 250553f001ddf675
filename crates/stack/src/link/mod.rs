//! Link layer: Ethernet headers, VLANs, the queues to the device and to this host itself.

mod ethernet;

pub(crate) use ethernet::LinkMeta;
