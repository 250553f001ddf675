//! What is said when another daemon is to go on in this one's place.

use std::sync::mpsc;

use super::save::Belongings;

/// How the core and who asks it to hand over hear of each other.
pub(super) struct HandOver {
    /// What there is to be handed over, or why it is not.
    pub(super) offer: mpsc::Sender<Result<Parcel, String>>,
    /// The process that has taken it and goes on, if any. The core waits for this
    /// word.
    pub(super) outcome: mpsc::Receiver<Option<u32>>,
}

impl HandOver {
    /// Says why nothing is handed over.
    pub(super) fn refuse(&self, why: &str) {
        // Who asked may have gone.
        let _ = self.offer.send(Err(why.to_owned()));
    }
}

/// Everything that another daemon needs.
pub(super) struct Parcel {
    pub(super) state: Vec<u8>,
    pub(super) belongings: Belongings,
}

/// Who waits for what all cores have, while it comes together on one.
pub(super) struct Leaving {
    pub(super) to: HandOver,
    /// Cores that have not answered.
    pub(super) awaited: usize,
    /// How often all are still asked.
    pub(super) laps: usize,
    /// What could not come, the last time.
    pub(super) left: usize,
}
