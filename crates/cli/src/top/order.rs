//! Order of the processes.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::AppView;

/// Column that the processes are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum SortColumn {
    /// Process ID
    Pid,
    /// User ID
    User,
    /// Number of sockets
    Sockets,
    /// Number of connections
    Connected,
    /// Bytes, datagrams and connections that wait for the process
    Waiting,
    /// Commands per second
    Commands,
    /// Bytes per second to the process
    In,
    /// Bytes per second from the process
    Out,
    /// Memory of the data of its sockets
    Memory,
    /// Name
    Program,
}

/// Order of the processes: largest first, names from A on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SortOrder {
    pub(super) column: SortColumn,
    pub(super) is_reversed: bool,
}

impl SortOrder {
    /// Order by the column `steps` to the right, without leaving the table.
    pub(super) fn moved(self, steps: isize) -> Self {
        let all = SortColumn::value_variants();
        let at = all.iter().position(|column| *column == self.column).unwrap_or(0);
        let column = all[at.saturating_add_signed(steps).min(all.len() - 1)];
        Self { column, ..self }
    }

    /// Name of the column.
    pub(super) fn column_name(self) -> String {
        let value = self.column.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Sorts the processes; those alike by their process IDs.
    pub(super) fn sort(self, applications: &mut [AppView]) {
        applications.sort_by(|one, other| {
            let order = compare(self.column, one, other);
            let order = if self.is_reversed { order.reverse() } else { order };
            order.then(one.pid.cmp(&other.pid))
        });
    }
}

fn compare(column: SortColumn, one: &AppView, other: &AppView) -> Ordering {
    match column {
        SortColumn::Pid => other.pid.cmp(&one.pid),
        SortColumn::User => other.uid.cmp(&one.uid),
        SortColumn::Sockets => other.sockets.cmp(&one.sockets),
        SortColumn::Connected => other.connections.cmp(&one.connections),
        SortColumn::Waiting => other.waiting.cmp(&one.waiting),
        SortColumn::Commands => other.commands_per_s.total_cmp(&one.commands_per_s),
        SortColumn::In => other.bytes_in_per_s.total_cmp(&one.bytes_in_per_s),
        SortColumn::Out => other.bytes_out_per_s.total_cmp(&one.bytes_out_per_s),
        SortColumn::Memory => other.memory_bytes.cmp(&one.memory_bytes),
        SortColumn::Program => one.name.cmp(&other.name),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn app(pid: u32, name: &str, commands_per_s: f64, sockets: usize) -> AppView {
        AppView {
            name: name.to_owned(),
            pid,
            uid: 0,
            sockets,
            connections: 0,
            waiting: 0,
            commands_per_s,
            bytes_in_per_s: 0.0,
            bytes_out_per_s: 0.0,
            memory_bytes: 0,
            cores: BTreeSet::new(),
        }
    }

    fn sorted(column: SortColumn, is_reversed: bool) -> Vec<u32> {
        let mut apps = vec![app(1, "b", 5.0, 7), app(2, "a", 9.0, 7), app(3, "c", 1.0, 8)];
        SortOrder { column, is_reversed }.sort(&mut apps);
        apps.iter().map(|app| app.pid).collect()
    }

    #[test]
    fn largest_comes_first_and_names_from_a_on() {
        assert_eq!(sorted(SortColumn::Commands, false), [2, 1, 3]);
        assert_eq!(sorted(SortColumn::Commands, true), [3, 1, 2]);
        assert_eq!(sorted(SortColumn::Sockets, false), [3, 1, 2]);
        assert_eq!(sorted(SortColumn::Program, false), [2, 1, 3]);
    }

    #[test]
    fn keys_stay_within_the_columns() {
        let order = SortOrder { column: SortColumn::User, is_reversed: false };
        assert_eq!(order.moved(-5).column, SortColumn::Pid);
        assert_eq!(order.moved(1).column, SortColumn::Sockets);
        assert_eq!(order.moved(100).column, SortColumn::Program);
        assert_eq!(order.column_name(), "user");
    }
}
