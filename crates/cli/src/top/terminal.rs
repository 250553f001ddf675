//! The view on a terminal: the daemon, its last intervals, and its processes.

use std::collections::VecDeque;
use std::io;

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row, Sparkline, Table, Wrap};

use super::order::SortOrder;
use super::{COLUMNS, IntervalView, ReportPoller};

/// Number of intervals that are kept.
const KEPT_INTERVALS: usize = 300;
/// Width of the text before a line of history.
const HISTORY_TEXT_WIDTH: u16 = 30;

/// Reaction to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyAction {
    Quit,
    /// Sort by the column so many to the right.
    MoveSort(isize),
    Reverse,
    Ignore,
}

/// Rates of the last intervals, the newest last.
#[derive(Debug, Default)]
struct History {
    frames_in: VecDeque<u64>,
    frames_out: VecDeque<u64>,
    dropped: VecDeque<u64>,
}

impl History {
    fn push(&mut self, view: &IntervalView) {
        let dropped: f64 = view.drops_per_s.iter().map(|(_, rate)| rate).sum();
        for (rates, rate) in [
            (&mut self.frames_in, view.frames_in_per_s),
            (&mut self.frames_out, view.frames_out_per_s),
            (&mut self.dropped, dropped),
        ] {
            if rates.len() == KEPT_INTERVALS {
                rates.pop_front();
            }
            rates.push_back(rate as u64);
        }
    }

    fn lines(&self) -> [(&str, &VecDeque<u64>); 3] {
        [
            ("frames/s in", &self.frames_in),
            ("frames/s out", &self.frames_out),
            ("dropped/s", &self.dropped),
        ]
    }
}

/// State of the view.
pub(super) struct TerminalView {
    order: SortOrder,
    history: History,
}

impl TerminalView {
    pub(super) fn new(order: SortOrder) -> Self {
        Self { order, history: History::default() }
    }

    /// Shows the daemon until q, Esc or Ctrl-C.
    pub(super) fn show(
        &mut self,
        terminal: &mut ratatui::DefaultTerminal,
        poller: &mut ReportPoller<'_>,
    ) -> io::Result<()> {
        let mut view = IntervalView::new(&poller.last, &poller.last, poller.interval);
        loop {
            self.order.sort(&mut view.applications);
            terminal.draw(|frame| self.draw(frame, &view))?;
            if !event::poll(poller.remaining())? {
                view = poller.next()?;
                self.history.push(&view);
                continue;
            }
            let Event::Key(key) = event::read()? else { continue };
            match action(key) {
                KeyAction::Quit => return Ok(()),
                KeyAction::MoveSort(steps) => self.order = self.order.moved(steps),
                KeyAction::Reverse => self.order.is_reversed = !self.order.is_reversed,
                KeyAction::Ignore => {}
            }
        }
    }

    fn draw(&self, frame: &mut Frame<'_>, view: &IntervalView) {
        let constraints = [
            Constraint::Length(1),
            Constraint::Length(3),
            Constraint::Length(3),
            Constraint::Fill(1),
        ];
        let [title, head, history, table] = Layout::vertical(constraints).areas(frame.area());
        let text = format!(
            "tidegate top, sorted by {}{}; < > sort, r reverse, q quit",
            self.order.column_name(),
            if self.order.is_reversed { ", reversed" } else { "" }
        );
        frame.render_widget(Line::from(text).bold(), title);
        let lines = view.summary_lines().map(Line::from);
        let wrap = Wrap { trim: true };
        frame.render_widget(Paragraph::new(Text::from(lines.to_vec())).wrap(wrap), head);
        self.draw_history(frame, history);
        let widths = [8, 6, 8, 9, 9, 11, 12, 12, 8, 4]
            .map(Constraint::Length)
            .into_iter()
            .chain([Constraint::Fill(1)]);
        let rows = view.applications.iter().map(|app| Row::new(app.cells()));
        let heading = Row::new(COLUMNS).style(Style::new().reversed());
        frame.render_widget(Table::new(rows, widths).header(heading), table);
    }

    /// Draws the last intervals, as many as fit, the newest on the right.
    fn draw_history(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows: [Rect; 3] = Layout::vertical([Constraint::Length(1); 3]).areas(area);
        for ((name, rates), row) in self.history.lines().into_iter().zip(rows) {
            let columns = [Constraint::Length(HISTORY_TEXT_WIDTH), Constraint::Fill(1)];
            let [text, bars] = Layout::horizontal(columns).areas(row);
            let max = rates.iter().max().copied().unwrap_or(0);
            frame.render_widget(Line::from(format!("{name:<12} up to {max}")), text);
            let shown = rates.len().min(usize::from(bars.width));
            let newest: Vec<u64> = rates.iter().skip(rates.len() - shown).copied().collect();
            frame.render_widget(Sparkline::default().data(&newest), bars);
        }
    }
}

fn action(key: KeyEvent) -> KeyAction {
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        _ if key.kind != KeyEventKind::Press => KeyAction::Ignore,
        KeyCode::Char('c') if is_control => KeyAction::Quit,
        KeyCode::Char('q') | KeyCode::Esc => KeyAction::Quit,
        KeyCode::Char('<') | KeyCode::Left => KeyAction::MoveSort(-1),
        KeyCode::Char('>') | KeyCode::Right => KeyAction::MoveSort(1),
        KeyCode::Char('r') => KeyAction::Reverse,
        _ => KeyAction::Ignore,
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::order::SortColumn;
    use super::super::tests::view;
    use super::*;

    #[test]
    fn terminal_lists_every_process_and_the_last_intervals() {
        let order = SortOrder { column: SortColumn::Commands, is_reversed: false };
        let mut shown = TerminalView::new(order);
        (0..2 * KEPT_INTERVALS).for_each(|_| shown.history.push(&view()));
        assert_eq!(shown.history.dropped.len(), KEPT_INTERVALS);
        let mut terminal = Terminal::new(TestBackend::new(120, 14)).unwrap();
        terminal.draw(|frame| shown.draw(frame, &view())).unwrap();
        let text = terminal.backend().to_string();
        for part in [
            "core 50 % busy",
            "no_route 10/s",
            "PROGRAM",
            "redis",
            "COMMANDS/S",
            "sorted by commands",
            "frames/s in  up to 100",
            "dropped/s    up to 10",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn keys_quit_and_sort() {
        let press = |code, modifiers| action(KeyEvent::new(code, modifiers));
        assert_eq!(press(KeyCode::Char('q'), KeyModifiers::NONE), KeyAction::Quit);
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::CONTROL), KeyAction::Quit);
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::NONE), KeyAction::Ignore);
        assert_eq!(press(KeyCode::Char('>'), KeyModifiers::NONE), KeyAction::MoveSort(1));
        assert_eq!(press(KeyCode::Left, KeyModifiers::NONE), KeyAction::MoveSort(-1));
        assert_eq!(press(KeyCode::Char('r'), KeyModifiers::NONE), KeyAction::Reverse);
    }
}
