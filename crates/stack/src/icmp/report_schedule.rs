//! Schedule of multicast listener reports (RFC 3810).

use tidegate_wire::mld::MldRecordKind;

const SECOND_NS: u64 = 1_000_000_000;
/// Interval between the reports of a change (RFC 3810 section 9.11).
const UNSOLICITED_REPORT_INTERVAL_NS: u64 = SECOND_NS;

/// Schedule of the next report.
#[derive(Default)]
pub(crate) struct ReportSchedule {
    due_ns: Option<u64>,
    /// Remaining repetitions of the report of a change (RFC 3810 section 9.1).
    pending_change_reports: u8,
}

impl ReportSchedule {
    /// Schedules two reports of a change, the first one now.
    pub(crate) fn report_change(&mut self, now_ns: u64) {
        *self = Self { due_ns: Some(now_ns), pending_change_reports: 2 };
    }

    /// Schedules the answer to a query, unless a report is due earlier.
    pub(crate) fn answer_query(&mut self, report_ns: u64) {
        self.due_ns = Some(self.due_ns.map_or(report_ns, |due_ns| due_ns.min(report_ns)));
    }

    /// Time in nanoseconds of the next report.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.due_ns
    }

    /// Returns the kind of the report that is due, if any, and schedules the next one.
    pub(crate) fn poll_due(&mut self, now_ns: u64) -> Option<MldRecordKind> {
        self.due_ns.filter(|&due_ns| due_ns <= now_ns)?;
        let kind = match self.pending_change_reports {
            0 => MldRecordKind::ModeIsExclude,
            _ => MldRecordKind::ChangeToExclude,
        };
        self.pending_change_reports = self.pending_change_reports.saturating_sub(1);
        self.due_ns =
            (self.pending_change_reports > 0).then_some(now_ns + UNSOLICITED_REPORT_INTERVAL_NS);
        Some(kind)
    }
}
