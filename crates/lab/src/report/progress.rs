//! Progress of an experiment on standard error: a line for each finished step, with the number of
//! steps and the time left.
//!
//! On a terminal a bar stands below the lines. Otherwise each line ends with the same words.

use std::fmt::Display;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tidegate_program::output::log;

/// Progress through a known number of steps. Threads may share it.
#[derive(Debug)]
pub struct Progress {
    /// Name of the part of the experiment; empty for the whole.
    part: &'static str,
    bar: ProgressBar,
    began: Instant,
}

impl Progress {
    /// Starts an experiment of `steps` steps.
    pub fn new(steps: usize) -> Self {
        Self::of_part("", steps)
    }

    /// Starts a part of an experiment, of `steps` steps. The part's name stands before the number
    /// of steps, which is of this part alone.
    pub fn of_part(part: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        // The template is a constant without unknown keys.
        let style = ProgressStyle::with_template("{bar:30} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { part, bar, began: Instant::now() }
    }

    /// Counts a finished step and prints its line.
    pub fn step(&self, line: impl Display) {
        self.bar.inc(1);
        let (done, steps) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let separator = if self.part.is_empty() { "" } else { ": " };
        let time = describe(done, steps, self.began.elapsed());
        let state = format!("{}{separator}{time}", self.part);
        if self.bar.is_hidden() {
            log(format_args!("{line} ({state})"));
        } else {
            self.bar.println(line.to_string());
            self.bar.set_message(state);
        }
    }

    /// Counts a finished step that has no line.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// Prints a line in the course of a step.
    pub fn line(&self, line: impl Display) {
        if self.bar.is_hidden() {
            log(line);
        } else {
            self.bar.println(line.to_string());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Finished steps and time left, as the steps so far took on average.
fn describe(done: u64, steps: u64, elapsed: Duration) -> String {
    let left = steps.saturating_sub(done);
    if left == 0 || done == 0 {
        return format!("{done} of {steps}");
    }
    let seconds = elapsed.as_secs_f64() / done as f64 * left as f64;
    let time = match seconds {
        ..10.0 => format!("{seconds:.0} s"),
        ..90.0 => format!("{:.0} s", (seconds / 10.0).round() * 10.0),
        ..5400.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    };
    format!("{done} of {steps}, about {time} left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_follows_from_the_finished_steps() {
        let of = |done, seconds| describe(done, 40, Duration::from_secs(seconds));
        assert_eq!(of(0, 5), "0 of 40");
        assert_eq!(of(12, 77), "12 of 40, about 3 min left");
        assert_eq!(of(39, 117), "39 of 40, about 3 s left");
        assert_eq!(of(20, 43), "20 of 40, about 40 s left");
        assert_eq!(of(1, 3_600), "1 of 40, about 39.0 h left");
        assert_eq!(of(40, 100), "40 of 40");
        assert_eq!(of(41, 100), "41 of 40");
    }

    #[test]
    fn threads_share_the_count() {
        let progress = Progress::new(8);
        std::thread::scope(|scope| {
            for number in 0..4 {
                let progress = &progress;
                scope.spawn(move || {
                    progress.line(number);
                    progress.step(format_args!("{number} done"));
                });
            }
        });
        assert_eq!(progress.bar.position(), 4);
    }
}
