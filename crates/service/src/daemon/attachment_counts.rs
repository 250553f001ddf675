//! Counts of attachments, in all and by user.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// Limits of the number of attachments. A program has one for each network core that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct AttachmentLimits {
    max: u32,
    max_per_user: u32,
}

impl AttachmentLimits {
    /// Descriptors of an attachment: the connection and both memory files.
    const FDS: u64 = 3;

    /// Configured limits, as far as half of `max_fds` descriptors is enough for them. One user
    /// leaves at least a quarter to the others.
    pub(in crate::daemon) fn new(max: u32, max_per_user: u32, max_fds: u64) -> Self {
        let max = max.min(u32::try_from(max_fds / 2 / Self::FDS).unwrap_or(u32::MAX)).max(1);
        Self { max, max_per_user: max_per_user.min(max - max / 4) }
    }
}

/// Counts of the attachments of a daemon.
#[derive(Clone, Debug, Default)]
pub(in crate::daemon) struct AttachmentCounts(Arc<Mutex<HashMap<u32, u32>>>);

impl AttachmentCounts {
    /// Counts an attachment of a user.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] if there would be too many.
    pub(in crate::daemon) fn admit(
        &self,
        uid: u32,
        limits: AttachmentLimits,
    ) -> io::Result<AttachmentCount> {
        let AttachmentLimits { max, max_per_user } = limits;
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = counts.get(&uid).copied().unwrap_or(0);
        if own >= max_per_user || counts.values().sum::<u32>() >= max {
            let of =
                if own >= max_per_user { format!("user {uid} has") } else { "there are".into() };
            let reached = if own >= max_per_user { max_per_user } else { max };
            let message = format!(
                "{of} {reached} attachments, the maximum: end programs, or raise \
                 --max-attachments, --max-user-attachments or the daemon's limit of open files"
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, message));
        }
        counts.insert(uid, own + 1);
        Ok(AttachmentCount { uid, counts: self.clone() })
    }

    /// Counts an attachment that another daemon had admitted.
    pub(in crate::daemon) fn add(&self, uid: u32) -> AttachmentCount {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(uid).or_default() += 1;
        AttachmentCount { uid, counts: self.clone() }
    }
}

/// Unit of the counts, until it is dropped.
#[derive(Debug)]
pub(in crate::daemon) struct AttachmentCount {
    uid: u32,
    counts: AttachmentCounts,
}

impl Drop for AttachmentCount {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = counts.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachments_are_limited_for_each_user_and_in_all() {
        let counts = AttachmentCounts::default();
        let limits = AttachmentLimits { max: 4, max_per_user: 3 };
        let mut first: Vec<_> = (0..3).map(|_| counts.admit(1, limits).unwrap()).collect();
        let error = counts.admit(1, limits).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("user 1 has 3"), "{error}");
        let second = counts.admit(2, limits).unwrap();
        let error = counts.admit(2, limits).unwrap_err();
        assert!(error.to_string().contains("there are 4"), "{error}");
        first.pop();
        let third = counts.admit(2, limits).unwrap();
        drop((first, second, third));
        assert!(counts.0.lock().unwrap().is_empty());
        // What another daemon had admitted counts, too.
        let _taken_over: Vec<_> = (0..4).map(|_| counts.add(1)).collect();
        assert!(counts.admit(2, limits).is_err());
    }

    #[test]
    fn limits_leave_descriptors_and_attachments_to_others() {
        let limits = AttachmentLimits::new(u32::MAX, u32::MAX, 1024);
        assert_eq!(limits, AttachmentLimits { max: 170, max_per_user: 128 });
        let limits = AttachmentLimits::new(10, 5, 1 << 20);
        assert_eq!(limits, AttachmentLimits { max: 10, max_per_user: 5 });
        let limits = AttachmentLimits::new(u32::MAX, u32::MAX, 0);
        assert_eq!(limits, AttachmentLimits { max: 1, max_per_user: 1 });
    }
}
