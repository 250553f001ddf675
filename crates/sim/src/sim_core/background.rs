//! Background tasks: processes beside the network service.

use super::SimCore;
use crate::processor::TaskId;
use crate::setup::BackgroundTask;
use crate::timers::Timer;

impl SimCore {
    pub(super) fn begin_background(&mut self, task: TaskId) -> Option<u64> {
        let state = self.background.iter_mut().find(|state| state.task == task)?;
        match state.background {
            BackgroundTask::Compute => Some(1_000_000),
            BackgroundTask::Send { cost_ns, .. } => {
                state.due = state.due.checked_sub(1)?;
                Some(cost_ns)
            }
        }
    }

    pub(super) fn finish_background(&mut self, task: TaskId) {
        let state = self.background.iter_mut().find(|state| state.task == task);
        if let Some(state) = state.filter(|state| state.background != BackgroundTask::Compute) {
            state.sent += 1;
        }
    }

    /// Makes the packets due whose periods have begun.
    #[inline]
    pub(super) fn on_background_timers(&mut self) {
        let now_ns = self.now_ns();
        for (index, state) in self.background.iter_mut().enumerate() {
            if let BackgroundTask::Send { period_ns, .. } = state.background
                && self.timers.advance(Timer::Background as usize + index, now_ns, period_ns)
            {
                state.due += 1;
                self.processor.wake(state.task);
            }
        }
    }
}
