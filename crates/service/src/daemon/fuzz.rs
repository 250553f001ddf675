//! A state from anybody: what the fuzz target `daemon_state` does with bytes, and
//! the tests with its seeds. It is no part of a daemon.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use tidegate_memory::shared::Region;

use super::passages::{Passage, Passages};
use super::quota::Terms;
use super::save::restore;
use super::state::State;
use crate::contract::layout::Geometry;

/// No state that a target makes needs more memory, in words of eight bytes, and
/// more descriptors.
const MOST_WORDS: usize = 1 << 20;
const MOST_DESCRIPTORS: usize = 32;

/// What became of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// They are no state at all.
    Unreadable,
    /// No daemon can go on from it.
    Refused,
    /// A daemon could go on from it.
    TakenUp,
}

/// Takes bytes for the state of a daemon, with as many descriptors as it says,
/// and does with applications what a core would.
pub fn check(bytes: &[u8]) -> Outcome {
    let Ok(state) = State::decode(bytes) else { return Outcome::Unreadable };
    let apps = state.applications.iter().flatten().count();
    let held = state.claims.iter().filter(|claim| claim.is_held).count();
    let others = apps + held + usize::from(state.port.is_some());
    let Ok(descriptors) = descriptors(&state.memories, others) else { return Outcome::Refused };
    let Ok((_, mut restored, _)) = restore(state, descriptors, Terms::default()) else {
        return Outcome::Refused;
    };
    let is_there = |passage: &Passage| restored.sockets.get(passage.key).is_some();
    if Passages::restore(restored.passages, 0, is_there).is_err() {
        return Outcome::Refused;
    }
    for app in restored.apps.iter_mut().flatten() {
        for place in [0, 3, u32::MAX] {
            let _ = app.tell_changed(place);
            app.leave(place, false);
        }
        let _ = (app.next_command(), app.reserve(), app.finish_telling(0));
    }
    Outcome::TakenUp
}

fn descriptors(memories: &[Geometry], others: usize) -> io::Result<Vec<OwnedFd>> {
    if 2 * memories.len() + others > MOST_DESCRIPTORS {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut descriptors = Vec::new();
    for geometry in memories {
        let sizes = match geometry.is_sound() {
            true => [geometry.control_words(), geometry.data_words()],
            false => [1, 1],
        };
        for words in sizes {
            if words > MOST_WORDS {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            descriptors.push(Region::reserve(words)?.as_fd().try_clone_to_owned()?);
        }
    }
    for _ in 0..others {
        descriptors.push(UnixStream::pair()?.0.into());
    }
    Ok(descriptors)
}
