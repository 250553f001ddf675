//! Query files in dnsperf's format: one `name type` per line.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use domain::base::Rtype;
use domain::base::name::Name;

use crate::error::LoadError;
use crate::template::sum;

/// DNS queries, ready to send except for their id.
#[derive(Clone, Debug, Default)]
pub struct QuerySet {
    bytes: Vec<u8>,
    queries: Vec<QuerySpan>,
}

#[derive(Clone, Copy, Debug)]
struct QuerySpan {
    start: u32,
    len: u16,
    sum: u32,
}

/// OPT record of a query with EDNS: root name, type OPT, UDP payload size 1232 (RFC 6891,
/// section 6.1.2).
const OPT: [u8; 11] = [0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0];

/// Maximum length of a query: header, name of up to 255 bytes, type, class and OPT record.
pub const MAX_QUERY_BYTES: usize = 12 + 255 + 4 + OPT.len();

impl QuerySet {
    /// Reads a query file. With `edns` each query has an OPT record that allows responses of 1232
    /// bytes.
    ///
    /// # Errors
    /// [`LoadError::File`] when the file cannot be read; [`LoadError::Query`] with the number of the
    /// first line that is not a query, or when the file has no query.
    pub fn read(path: &Path, edns: bool) -> Result<Self, LoadError> {
        let text = fs::read_to_string(path).map_err(LoadError::file(path))?;
        Self::parse(&text, path, edns)
    }

    /// Parses the text of a query file; `path` is used in errors only.
    ///
    /// # Errors
    /// [`LoadError::Query`] for a line that is not a query, or when the text has no query.
    pub fn parse(text: &str, path: &Path, edns: bool) -> Result<Self, LoadError> {
        let mut set = Self::default();
        let mut lines = 0;
        for (index, line) in text.lines().enumerate() {
            lines = index + 1;
            let line = line.trim();
            if line.is_empty() || line.starts_with([';', '#']) {
                continue;
            }
            set.push_line(line, edns).map_err(|problem| LoadError::Query {
                path: path.to_path_buf(),
                line: lines,
                problem,
            })?;
        }
        if set.queries.is_empty() {
            let problem = "there is no query in this file".to_owned();
            return Err(LoadError::Query { path: path.to_path_buf(), line: lines, problem });
        }
        Ok(set)
    }

    fn push_line(&mut self, line: &str, edns: bool) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let (Some(name), Some(kind)) = (words.next(), words.next()) else {
            return Err(format!("{line:?} has no type"));
        };
        if let Some(extra) = words.next() {
            return Err(format!("{extra:?} follows the type"));
        }
        let name = Name::<Vec<u8>>::from_str(name)
            .map_err(|error| format!("{name:?} is not a name ({error})"))?;
        let kind = Rtype::from_str(kind).map_err(|_| format!("{kind:?} is not a record type"))?;
        self.push(name.as_slice(), kind.to_int(), edns);
        Ok(())
    }

    /// Adds a query for `name` (wire format, uncompressed) and a record type: class IN, id 0,
    /// recursion not desired.
    pub fn push(&mut self, name: &[u8], record_type: u16, edns: bool) {
        let start = self.bytes.len();
        self.bytes.extend([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns)]);
        self.bytes.extend(name);
        self.bytes.extend(record_type.to_be_bytes());
        self.bytes.extend([0, 1]);
        if edns {
            self.bytes.extend(OPT);
        }
        let query = &self.bytes[start..];
        let (len, sum) = (query.len() as u16, sum(query));
        self.queries.push(QuerySpan { start: start as u32, len, sum });
    }

    /// Returns a set of the queries with these indices.
    ///
    /// # Panics
    /// When an index is out of range.
    #[must_use]
    pub fn select(&self, indices: &[usize]) -> Self {
        let mut set = Self::default();
        for &index in indices {
            let (query, sum) = self.get(index);
            let (start, len) = (set.bytes.len() as u32, query.len() as u16);
            set.bytes.extend(query);
            set.queries.push(QuerySpan { start, len, sum });
        }
        set
    }

    /// Returns the number of queries.
    pub fn len(&self) -> usize {
        self.queries.len()
    }

    /// True when the set has no query.
    pub fn is_empty(&self) -> bool {
        self.queries.is_empty()
    }

    /// Returns the query at `index` and the sum of its 16-bit words.
    ///
    /// # Panics
    /// When the index is out of range.
    #[inline]
    pub fn get(&self, index: usize) -> (&[u8], u32) {
        let span = self.queries[index];
        let start = span.start as usize;
        (&self.bytes[start..start + usize::from(span.len)], span.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<QuerySet, LoadError> {
        QuerySet::parse(text, Path::new("queries.txt"), false)
    }

    #[test]
    fn parses_each_line_into_a_query() {
        let set = parse("; a comment\n\nexample.org A\nwww.Example.org. TYPE65\n").unwrap();
        assert_eq!(set.len(), 2);
        let (first, first_sum) = set.get(0);
        assert_eq!(first[..12], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&first[12..], b"\x07example\x03org\x00\x00\x01\x00\x01");
        assert_eq!(first_sum, sum(first));
        assert!(set.get(1).0.ends_with(b"\x03www\x07Example\x03org\x00\x00\x41\x00\x01"));
    }

    #[test]
    fn a_selection_has_the_same_queries() {
        let set = parse("a. A\nb. AAAA\nc. TXT\n").unwrap();
        let some = set.select(&[2, 0]);
        assert_eq!(some.len(), 2);
        assert_eq!(some.get(0), set.get(2));
        assert_eq!(some.get(1), set.get(0));
    }

    #[test]
    fn edns_adds_one_record() {
        let set = QuerySet::parse(". SOA", Path::new("q"), true).unwrap();
        let (query, _) = set.get(0);
        assert_eq!(query[11], 1);
        assert_eq!(query.len(), 12 + 1 + 4 + 11);
    }

    #[test]
    fn errors_name_the_line_and_the_word() {
        let cases = [
            ("a. A\nb.\n", 2, "has no type"),
            ("a. A\n\nb. NOPE\n", 3, "\"NOPE\" is not a record type"),
            ("a..b A", 1, "is not a name"),
            ("a. A IN", 1, "\"IN\" follows"),
            ("# nothing\n", 1, "no query"),
        ];
        for (text, line, part) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("queries.txt:{line}:")), "{error}");
            assert!(error.contains(part), "{error}");
        }
        let label = "x".repeat(64);
        assert!(parse(&format!("{label}. A")).is_err());
    }

    #[test]
    fn error_names_the_missing_file() {
        let error = QuerySet::read(Path::new("no/such/file"), false).unwrap_err();
        assert!(error.to_string().starts_with("no/such/file:"), "{error}");
    }
}
