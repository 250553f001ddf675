//! What the cores of a daemon know of each other.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tidegate_memory::Doorbell;
use tidegate_port::spread::Crossing;

use super::application::Application;
use super::load::Load;
use super::post::{Message, Post};
use super::report::Report;

/// How often the cores are asked for what all of them have at a time.
const REPORTS_MAX: usize = 1000;

/// Who is searched core by core may be on the way from one to the next: so many
/// times around they are asked.
const LAPS: usize = 64;

/// The cores of a daemon. Core 0 has the card.
pub(super) struct Cores {
    posts: Vec<Post>,
    loads: Vec<Load>,
    /// How many get new applications.
    used: AtomicUsize,
    /// Everything is to be on the core with the card.
    gathers: AtomicBool,
    /// Where their ways cross; there is none with one core.
    crossing: Option<Arc<Crossing>>,
    /// For the door, when an application was let go.
    let_go_bell: Doorbell,
}

impl Cores {
    pub(super) fn new(
        posts: Vec<Post>,
        limits: &RangeInclusive<usize>,
        crossing: Option<Arc<Crossing>>,
    ) -> io::Result<Self> {
        let cores = Self {
            loads: posts.iter().map(|_| Load::default()).collect(),
            posts,
            used: AtomicUsize::new(0),
            gathers: AtomicBool::new(false),
            crossing,
            let_go_bell: Doorbell::new()?,
        };
        cores.set_used(*limits.start());
        Ok(cores)
    }

    /// By which the door hears that applications were let go.
    pub(super) fn let_go_bell(&self) -> &Doorbell {
        &self.let_go_bell
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.posts.len()
    }

    /// How many cores are asked for somebody who is on one of them.
    pub(super) fn most_hops(&self) -> usize {
        LAPS * self.count()
    }

    /// How to reach one.
    pub(super) fn post(&self, core: usize) -> &Post {
        &self.posts[core]
    }

    /// How busy one is.
    pub(super) fn load(&self, core: usize) -> &Load {
        &self.loads[core]
    }

    /// From now on whatever goes from core to core goes to the one with the card,
    /// or no longer so.
    pub(super) fn set_gathers(&self, gathers: bool) {
        self.gathers.store(gathers, Ordering::SeqCst);
    }

    /// Where something goes that is to go to a core.
    pub(super) fn way_to(&self, core: usize) -> usize {
        if self.gathers() { 0 } else { core }
    }

    /// Whether everything is to be on the core with the card.
    pub(super) fn gathers(&self) -> bool {
        self.gathers.load(Ordering::SeqCst)
    }

    pub(super) fn crossing(&self) -> Option<&Crossing> {
        self.crossing.as_deref()
    }

    /// The first so many get new applications.
    pub(super) fn set_used(&self, used: usize) {
        let used = used.min(self.count());
        self.used.store(used, Ordering::Relaxed);
        if let Some(crossing) = &self.crossing {
            (0..used).for_each(|core| crossing.set_used(core));
        }
    }

    /// How many get new applications.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Where a new application has the most room.
    pub(super) fn for_newcomer(&self) -> usize {
        let room = |&core: &usize| {
            let said = self.loads[core].said();
            (said.applications, said.busy)
        };
        (0..self.used()).min_by_key(room).unwrap_or(0)
    }

    /// Sends an application to a core.
    ///
    /// # Errors
    /// When the core has ended.
    pub(super) fn let_in(&self, core: usize, app: Application) -> io::Result<()> {
        self.loads[core].add_applications(1);
        self.posts[core].send(Message::Joined(Box::new(app), 0))
    }

    /// An application is another core's to let in.
    pub(super) fn count_one_elsewhere(&self, from: usize, to: usize) {
        self.loads[to].add_applications(1);
        self.loads[from].remove_applications(1);
    }

    fn applications(&self) -> usize {
        self.loads.iter().map(|load| load.said().applications as usize).sum()
    }

    /// How things stand with all of them.
    ///
    /// # Errors
    /// When a core has ended.
    pub(super) fn report(&self) -> io::Result<Report> {
        let mut left = REPORTS_MAX;
        loop {
            let reports = self.posts.iter().map(Post::report).collect::<io::Result<Vec<_>>>()?;
            let report = Report::join(reports, self.used());
            left -= 1;
            // One that is on its way from core to core may be missed, or told twice.
            if report.applications.len() == self.applications() || left == 0 {
                return Ok(report);
            }
            std::thread::yield_now();
        }
    }
}
